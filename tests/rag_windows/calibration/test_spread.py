from __future__ import annotations

import pytest

from rag_windows.calibration.spread import guard_of, guard_problem
from rag_windows.guard import mass_spread
from tests.rag_windows.calibration.profiles import GUARD


@pytest.mark.parametrize(
    ("masses", "spread"),
    [
        ([0.1, 0.4], 1 - (0.2**2 + 0.8**2)),
        ([0.3, 0.3], 0.5),
        ([0.01] * 50, 0.98),
        ([0.4, 0.0], 0.0),
        ([0.4], 0.0),
        ([0.0, 0.0], 0.0),
        ([], 0.0),
    ],
)
def test_spread_is_that_of_the_shares(masses: list[float], spread: float) -> None:
    assert mass_spread(masses) == pytest.approx(spread)


def test_the_threshold_separates_where_it_can() -> None:
    guard = guard_of([0.1, 0.2, 0.15, 0.05], [0.6, 0.9, 0.8, 0.7])
    assert guard is not None
    assert guard["threshold"] == pytest.approx(0.4)
    assert (guard["false_alarms"], guard["missed"]) == (0.0, 0.0)
    assert (guard["single_hop"], guard["multi_hop"]) == (4, 4)
    assert guard_problem(guard) is None


def test_the_threshold_tells_its_errors() -> None:
    guard = guard_of([0.1, 0.2, 0.3, 0.85], [0.25, 0.7, 0.8, 0.9])
    assert guard is not None
    assert 0.3 < guard["threshold"] < 0.7
    assert (guard["false_alarms"], guard["missed"]) == (0.25, 0.25)


def test_few_answers_make_no_threshold() -> None:
    assert guard_of([0.1, 0.2, 0.1], [0.9] * 9) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"threshold": 1.5}, "threshold must be a number from 0 to 1"),
        ({"missed": True}, "missed must be"),
        ({"measure": "entropy"}, "unknown measure 'entropy'"),
        ({"extra": 1}, "exactly the entries"),
    ],
)
def test_a_damaged_guard_is_told(change: dict[str, object], message: str) -> None:
    assert guard_problem(GUARD) is None
    problem = guard_problem({**GUARD, **change})
    assert problem is not None
    assert message in problem
