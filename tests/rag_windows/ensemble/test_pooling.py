"""Weights and what they make of distributions, by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from rag_windows import METHODS, InputError, MethodError, ParallelEnsemble
from rag_windows.methods import resolve


def logs(*rows: list[float]) -> torch.Tensor:
    """(1, windows, 1, vocabulary) log-probabilities."""
    return torch.tensor(rows).log()[None, :, None]


SURE, HALF, FLAT = [0.97, 0.01, 0.01, 0.01], [0.5, 0.5, 0.0, 0.0], [0.25] * 4


def weights(method: ParallelEnsemble, distributions: torch.Tensor) -> list[float]:
    return method.combination.weigh(distributions, None).flatten().tolist()


def test_retrieval_weighs_passages_and_not_their_windows() -> None:
    pooling = ParallelEnsemble(weights="retrieval", score_temperature=0.5).combination
    fixed = pooling.fixed([1.0, 2.0, 2.0, 0.5], [0, 1, 1, 2])
    assert fixed is not None
    passages = torch.softmax(torch.tensor([2.0, 4.0, 1.0]), dim=0)
    expected = [passages[0], passages[1] / 2, passages[1] / 2, passages[2]]
    assert fixed.tolist() == pytest.approx([float(x) for x in expected])


def test_scores_far_apart_stay_finite() -> None:
    pooling = ParallelEnsemble(weights="retrieval").combination
    fixed = pooling.fixed([-1e6, 0.0, 1e6], [0, 1, 2])
    assert fixed is not None
    assert fixed.tolist() == [0.0, 0.0, 1.0]
    impossible = logs([0.0, 1.0], [0.5, 0.5], [0.25, 0.75])
    combined = pooling.combine(impossible, pooling.weigh(impossible, fixed), None)
    assert combined.exp().flatten().tolist() == pytest.approx([0.25, 0.75])


@pytest.mark.parametrize("score", [None, math.nan, math.inf, "0.5"])
def test_a_score_that_is_none_is_refused_by_name(score: Any) -> None:
    pooling = ParallelEnsemble(weights="retrieval").combination
    with pytest.raises(InputError, match=r"The second .*score=.*'uniform'"):
        pooling.check([0.5, score], ["The first", "The second"])
    ParallelEnsemble().combination.check([0.5, score], ["", ""])


def test_entropies_become_weights() -> None:
    distributions = logs(HALF, FLAT)
    inverse = ParallelEnsemble(weights="entropy")
    assert weights(inverse, distributions) == pytest.approx([2 / 3, 1 / 3])
    minimum = ParallelEnsemble(weights="entropy", pooling="minimum")
    assert weights(minimum, logs(FLAT, SURE, HALF)) == [0, 1, 0]
    assert weights(minimum, logs(FLAT, FLAT)) == [1, 0]


def test_a_window_without_any_doubt_takes_nearly_all() -> None:
    certain = logs([1.0, 0.0, 0.0, 0.0], FLAT)
    found = weights(ParallelEnsemble(weights="entropy"), certain)
    assert found[0] > 0.999
    assert sum(found) == pytest.approx(1)


def test_the_prior_is_taken_away_inside_the_nucleus_only() -> None:
    window, prior = logs([0.6, 0.3, 0.0999, 0.0001]), logs([0.9, 0.05, 0.05, 0.0])[:, 0]
    one = torch.ones(1, 1, 1)

    def combined(nucleus: float) -> list[float]:
        method = ParallelEnsemble(beta=1.0, nucleus=nucleus)
        return method.combination.combine(window, one, prior).exp().flatten().tolist()

    raw = [0.6**2 / 0.9, 0.3**2 / 0.05, 0.0999, 0.0001]
    assert combined(0.92) == pytest.approx([value / sum(raw) for value in raw])
    assert combined(1.0)[3] == pytest.approx(1.0)


def test_nothing_is_infinite() -> None:
    one = torch.full((1, 2, 1), 0.5)
    pooling = ParallelEnsemble(beta=0.5, nucleus=1).combination
    distributions = logs([1.0, 0.0, 0.0, 0.0], HALF)
    combined = pooling.combine(distributions, one, logs([0.0, 0.0, 0.0, 1.0])[:, 0])
    assert torch.isfinite(combined).all()
    assert combined.exp().sum().item() == pytest.approx(1)


def test_names_and_defaults() -> None:
    assert METHODS["ensemble"] is ParallelEnsemble
    assert resolve("ensemble") == ParallelEnsemble()
    assert not ParallelEnsemble().combination.prior
    assert not ParallelEnsemble(weights="retrieval").combination.prior
    assert ParallelEnsemble(weights="entropy").combination.beta == 0.25
    assert not ParallelEnsemble(weights="entropy", beta=0).combination.prior


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"weights": "bm25"}, "uniform"),
        ({"pooling": "maximum"}, "minimum"),
        ({"score_temperature": 0}, "score_temperature"),
        ({"score_temperature": math.nan}, "score_temperature"),
        ({"beta": -0.1}, "0 leaves"),
        ({"beta": math.inf}, "beta"),
        ({"beta": "much"}, "beta"),
        ({"nucleus": 0}, "every token"),
        ({"nucleus": 1.5}, "every token"),
    ],
)
def test_other_numbers_are_refused(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(MethodError, match=says):
        ParallelEnsemble(**arguments)
