from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from rag_windows.evaluation.statistics.bleu import bleu
from rag_windows.evaluation.statistics.parts import Array, ratio
from rag_windows.evaluation.statistics.permutation import holm, is_exact, p_values

scipy_stats = pytest.importorskip("scipy.stats")


def means(*arms: Array) -> Array:
    """(groups, arms, 2) of one value a group."""
    values = np.stack(arms, axis=1)
    return np.stack([values, np.ones_like(values)], axis=2)


def counts(groups: int, arms: int, seed: int) -> Array:
    """Sums as BLEU has them, of made-up sentences."""
    rng = np.random.default_rng(seed)
    right = np.sort(rng.integers(0, 9, (groups, arms, 4)), axis=-1)[..., ::-1]
    total = np.array([20, 18, 16, 14]) + rng.integers(0, 4, (groups, arms, 1))
    lengths = rng.integers(18, 26, (groups, arms, 2))
    return np.concatenate([right, total, lengths], axis=-1).astype(np.float64)


@pytest.mark.parametrize("kind", ["mean", "bleu"])
def test_few_groups_are_exchanged_in_every_way(kind: str) -> None:
    rng = np.random.default_rng(3)
    if kind == "mean":
        # Whole numbers, so that many exchanges differ exactly as much as the data do.
        sums, formula = means(*rng.integers(0, 4, (2, 7)).astype(np.float64)), ratio
    else:
        sums, formula = counts(7, 2, 5), bleu
    own, base = sums[:, 1], sums[:, 0]
    observed = abs(formula(own.sum(axis=0)) - formula(base.sum(axis=0)))
    as_far = 0
    for exchanged in itertools.product((False, True), repeat=7):
        mask = np.array(exchanged)[:, None]
        first, second = np.where(mask, base, own), np.where(mask, own, base)
        apart = abs(formula(first.sum(axis=0)) - formula(second.sum(axis=0)))
        as_far += bool(apart >= observed - 1e-9)
    assert p_values(sums, 0, formula)[1] == as_far / 2**7


def test_it_agrees_with_scipy() -> None:
    rng = np.random.default_rng(4)
    for groups in (9, 40):
        change = rng.normal(0.4, 1, groups)
        wanted = scipy_stats.permutation_test(
            (change,),
            lambda x, axis: np.mean(x, axis=axis),
            permutation_type="samples",
            vectorized=True,
            n_resamples=20_000,
            rng=np.random.default_rng(5),
        ).pvalue
        (_, found) = p_values(means(np.zeros(groups), change), 0, ratio)
        assert found == pytest.approx(wanted, abs=1e-12 if is_exact(groups) else 0.015)


def test_p_is_uniform_where_there_is_no_difference() -> None:
    rng = np.random.default_rng(6)
    # 300 arms that differ from the base by chance alone, in groups of different sizes.
    spread = rng.random((40, 1)) * 10
    base = 50 + spread * rng.normal(size=(40, 1))
    change = spread * rng.normal(size=(40, 300))
    sums = means(base[:, 0], *(base + change).T)
    p = np.array(p_values(sums, 0, ratio, flips=2000)[1:])
    assert scipy_stats.kstest(p, "uniform").pvalue > 0.01
    assert 0.02 <= np.mean(p <= 0.05) <= 0.085


def test_a_difference_is_found_and_p_is_never_0() -> None:
    rng = np.random.default_rng(8)
    base = rng.random(60)
    p = p_values(means(base, base + 0.2 + 0.01 * rng.random(60)), 0, ratio, flips=500)
    assert p == [1.0, 1 / 501]


def test_what_cannot_differ_has_p_1() -> None:
    same = np.arange(5.0)
    assert p_values(means(same, same, same[::-1]), 0, ratio) == [1.0, 1.0, 1.0]
    # One group: exchanging it changes nothing but the sign.
    assert p_values(means(np.array([1.0]), np.array([90.0])), 0, ratio) == [1.0, 1.0]


def test_answers_of_a_group_are_exchanged_together() -> None:
    # Eight answers that all gained; in two groups they say no more than two answers would.
    base, own = np.zeros(8), np.ones(8)
    assert p_values(means(base, own), 0, ratio)[1] == 2 / 2**8
    grouped = np.array([[[0.0, 4.0], [4.0, 4.0]]] * 2)
    assert p_values(grouped, 0, ratio)[1] == 0.5


def test_an_arm_without_a_value_has_no_p() -> None:
    sums = means(np.ones(4), np.ones(4))
    sums[:, 1] = 0
    found = p_values(sums, 0, ratio)
    assert found[0] == 1
    assert math.isnan(found[1])


def test_the_seed_is_fixed() -> None:
    rng = np.random.default_rng(9)
    sums = means(rng.random(50), rng.random(50), rng.random(50))
    assert p_values(sums, 0, ratio) == p_values(sums, 0, ratio)
    # All arms see the same exchanges, so that a third one changes nothing for the second.
    assert p_values(sums[:, :2], 0, ratio) == p_values(sums, 0, ratio)[:2]


def test_holm() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, 0.9]) == [1.0, 1.0]
    found = holm([math.nan, 0.02, 0.03])
    assert math.isnan(found[0])
    assert found[1:] == [0.04, 0.04]
    assert holm([]) == []
