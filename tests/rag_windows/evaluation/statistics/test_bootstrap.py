from __future__ import annotations

import math

import numpy as np
import pytest

from rag_windows.evaluation.statistics.bootstrap import Bootstrap
from rag_windows.evaluation.statistics.parts import Array, ratio
from rag_windows.evaluation.statistics.resampling import blocks, count_drawn, drawn_sums


def sums_of(*arms: Array) -> Array:
    """(groups, arms, 2) of arms' (groups, size) values."""
    totals = np.stack([arm.sum(axis=1) for arm in arms], axis=1)
    sizes = np.full_like(totals, arms[0].shape[1])
    return np.stack([totals, sizes], axis=2)


def test_intervals_hold_the_truth_about_as_often_as_they_say() -> None:
    rng = np.random.default_rng(7)
    runs, inside, alone = 200, 0, 0
    for _ in range(runs):
        # Each group has a level of its own, so that its four values go together.
        values = 50 + 10 * rng.normal(size=(40, 1)) + 5 * rng.normal(size=(40, 4))
        found = Bootstrap(sums_of(values), ratio, resamples=400).value(0)
        inside += found.low <= 50 <= found.high
        ungrouped = Bootstrap(sums_of(values.reshape(-1, 1)), ratio, resamples=400).value(0)
        alone += ungrouped.low <= 50 <= ungrouped.high
    assert 0.89 <= inside / runs <= 0.99
    # What the groups are for: single values drawn apart would promise too much.
    assert alone / runs < 0.8


def test_draws_are_shared_so_that_differences_are_paired() -> None:
    rng = np.random.default_rng(1)
    base = 100 * rng.random((60, 3))
    found = Bootstrap(sums_of(base, base + 2, base), ratio)
    gain = found.difference(1, 0)
    assert (gain.value, gain.low, gain.high) == pytest.approx((2, 2, 2))
    same = found.difference(2, 0)
    assert (same.value, same.low, same.high) == (0, 0, 0)
    assert found.value(1).low == pytest.approx(found.value(0).low + 2)
    kept = found.retention(2, 0)
    assert (kept.value, kept.low, kept.high) == (100, 100, 100)


def test_retention_is_a_ratio_of_means() -> None:
    base = np.array([[40.0], [80.0], [60.0]])
    found = Bootstrap(sums_of(base, base / 4), ratio).retention(1, 0)
    assert (found.value, found.low, found.high) == pytest.approx((25, 25, 25))


def test_retention_of_nothing_is_nan() -> None:
    nothing = np.zeros((20, 1))
    found = Bootstrap(sums_of(nothing, nothing + 3), ratio).retention(1, 0)
    assert math.isnan(found.value)
    assert not found.bounded


def test_retention_has_no_interval_where_draws_often_have_no_base() -> None:
    base = np.zeros((20, 1))
    base[0] = 100
    found = Bootstrap(sums_of(base, base + 3), ratio)
    assert found.retention(1, 0).value == pytest.approx(160)
    assert not found.retention(1, 0).bounded
    assert found.difference(1, 0).bounded


def test_one_group_or_one_example_has_no_interval() -> None:
    found = Bootstrap(sums_of(np.array([[30.0, 50.0]]), np.array([[10.0, 10.0]])), ratio)
    assert found.value(0).value == 40
    assert found.difference(1, 0).value == -30
    assert found.retention(1, 0).value == 25
    assert not any(
        one.bounded for one in (found.value(0), found.difference(1, 0), found.retention(1, 0))
    )


def test_equal_values_have_an_interval_of_no_width() -> None:
    found = Bootstrap(sums_of(np.full((10, 2), 70.0)), ratio).value(0)
    assert (found.value, found.low, found.high) == (70, 70, 70)


def test_groups_count_by_their_size() -> None:
    sums = np.array([[[300.0, 3.0]], [[0.0, 1.0]]])
    assert Bootstrap(sums, ratio).value(0).value == 75


def test_draws_do_not_depend_on_how_many_columns_or_blocks_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sums = np.random.default_rng(2).random((9, 2, 3))
    whole = drawn_sums(sums, 50)
    assert whole.shape == (50, 2, 3)
    np.testing.assert_allclose(drawn_sums(sums[:, 1], 50), whole[:, 1], rtol=1e-12)
    monkeypatch.setattr("rag_windows.evaluation.statistics.resampling._BLOCK_BYTES", 8 * 9 * 7)
    assert list(blocks(50, 9)) == [7] * 7 + [1]
    np.testing.assert_allclose(drawn_sums(sums, 50), whole, rtol=1e-12)


def test_every_draw_has_as_many_groups_as_there_are() -> None:
    assert drawn_sums(np.ones((13, 1)), 20).tolist() == [[13.0]] * 20


def test_places_are_counted() -> None:
    drawn = np.array([[0, 0, 2], [1, 2, 1]])
    assert count_drawn(drawn).tolist() == [[2, 0, 1], [0, 2, 1]]
