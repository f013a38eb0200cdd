from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from rag_windows.evaluation import statistics
from rag_windows.evaluation.metrics import bleu
from rag_windows.evaluation.statistics import (
    Estimate,
    bootstrap,
    estimate,
    group_sums,
    holm,
    p_values,
    percent,
)
from rag_windows.evaluation.task import Array, Score, mean_rows, ratio


def sums_of(*arms: Array) -> Array:
    """(groups, arms, 2) of arms' (groups, size) values."""
    totals = np.stack([arm.sum(axis=1) for arm in arms], axis=1)
    sizes = np.full_like(totals, arms[0].shape[1])
    return np.stack([totals, sizes], axis=2)


def of(sums: Array, arm: int = 0) -> Estimate:
    values, drawn = bootstrap(sums, ratio)
    return estimate(values[arm], None if drawn is None else drawn[arm])


def kept(sums: Array) -> Estimate:
    """The second arm in percent of the first."""
    values, drawn = bootstrap(sums, ratio)
    return estimate(
        float(percent(values[1], values[0])), None if drawn is None else percent(drawn[1], drawn[0])
    )


def test_intervals_hold_the_truth_about_as_often_as_they_say(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(statistics, "RESAMPLES", 400)
    rng = np.random.default_rng(7)
    runs, inside, alone = 200, 0, 0
    for _ in range(runs):
        # Each group has a level of its own, so that its four values go together.
        values = 50 + 10 * rng.normal(size=(40, 1)) + 5 * rng.normal(size=(40, 4))
        found, ungrouped = of(sums_of(values)), of(sums_of(values.reshape(-1, 1)))
        inside += found.low <= 50 <= found.high
        alone += ungrouped.low <= 50 <= ungrouped.high
    assert 0.89 <= inside / runs <= 0.99
    # What the groups are for: single values drawn apart would promise too much.
    assert alone / runs < 0.8


def test_draws_are_shared_so_that_differences_are_paired() -> None:
    base = 100 * np.random.default_rng(1).random((60, 3))
    values, drawn = bootstrap(sums_of(base, base + 2, base), ratio)
    assert drawn is not None
    gain = estimate(values[1] - values[0], drawn[1] - drawn[0])
    assert (gain.value, gain.low, gain.high) == pytest.approx((2, 2, 2))
    same = estimate(values[2] - values[0], drawn[2] - drawn[0])
    assert (same.value, same.low, same.high) == (0, 0, 0)
    one = kept(sums_of(base, base))
    assert (one.value, one.low, one.high) == (100, 100, 100)


def test_retention_is_a_ratio_of_means() -> None:
    base = np.array([[40.0], [80.0], [60.0]])
    found = kept(sums_of(base, base / 4))
    assert (found.value, found.low, found.high) == pytest.approx((25, 25, 25))
    nothing = np.zeros((20, 1))
    assert math.isnan(kept(sums_of(nothing, nothing + 3)).value)


def test_retention_has_no_interval_where_draws_often_have_no_base() -> None:
    base = np.zeros((20, 1))
    base[0] = 100
    found = kept(sums_of(base, base + 3))
    assert found.value == pytest.approx(160)
    assert not found.bounded


def test_one_group_has_no_interval_and_groups_count_by_their_size() -> None:
    found = of(sums_of(np.array([[30.0, 50.0]])))
    assert (found.value, found.bounded) == (40, False)
    assert of(np.array([[[300.0, 3.0]], [[0.0, 1.0]]])).value == 75
    level = of(sums_of(np.full((10, 2), 70.0)))
    assert (level.value, level.low, level.high) == (70, 70, 70)


def test_groups_add_up() -> None:
    rows = np.array([[1.0, 2.0], [3.0, 4.0], [10.0, 20.0], [0.5, 0.0]])
    found = group_sums(rows, ["b", "a", "b", "c"])
    assert found.tolist() == [[11.0, 22.0], [3.0, 4.0], [0.5, 0.0]]


def test_a_mean_is_of_what_counts() -> None:
    score = Score.mean("x", [10.0, None, 0.0, 50.0])
    assert score.value == score.formula(score.rows.sum(axis=0)) == 20.0
    assert score.rows[1].tolist() == [0.0, 0.0]
    assert math.isnan(ratio(mean_rows([None]).sum(axis=0)))
    assert math.isnan(Score.mean("x", []).value)


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


def test_p_is_uniform_where_there_is_no_difference() -> None:
    rng = np.random.default_rng(6)
    # 300 arms that differ from the base by chance alone, in groups of different sizes.
    spread = rng.random((40, 1)) * 10
    base = 50 + spread * rng.normal(size=(40, 1))
    sums = means(base[:, 0], *(base + spread * rng.normal(size=(40, 300))).T)
    p = np.array(p_values(sums, 0, ratio)[1:])
    assert stats.kstest(p, "uniform").pvalue > 0.01
    assert 0.02 <= np.mean(p <= 0.05) <= 0.085


def test_a_difference_is_found_and_p_is_never_0() -> None:
    rng = np.random.default_rng(8)
    base = rng.random(60)
    p = p_values(means(base, base + 0.2 + 0.01 * rng.random(60)), 0, ratio)
    assert p == [1.0, 1 / 10_000]


def test_what_cannot_differ_has_p_1() -> None:
    same = np.arange(5.0)
    assert p_values(means(same, same, same[::-1]), 0, ratio) == [1.0, 1.0, 1.0]
    assert p_values(means(np.array([1.0]), np.array([90.0])), 0, ratio) == [1.0, 1.0]


def test_answers_of_a_group_are_exchanged_together() -> None:
    # Eight answers that all gained; in two groups they say no more than two answers would.
    assert p_values(means(np.zeros(8), np.ones(8)), 0, ratio)[1] == 2 / 2**8
    grouped = np.array([[[0.0, 4.0], [4.0, 4.0]]] * 2)
    assert p_values(grouped, 0, ratio)[1] == 0.5


def test_an_arm_without_a_value_has_no_p() -> None:
    sums = means(np.ones(4), np.ones(4))
    sums[:, 1] = 0
    found = p_values(sums, 0, ratio)
    assert found[0] == 1
    assert math.isnan(found[1])


def test_all_arms_see_the_same_exchanges() -> None:
    rng = np.random.default_rng(9)
    sums = means(rng.random(50), rng.random(50), rng.random(50))
    assert p_values(sums[:, :2], 0, ratio) == p_values(sums, 0, ratio)[:2]


def test_holm() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, 0.9]) == [1.0, 1.0]
    found = holm([math.nan, 0.02, 0.03])
    assert math.isnan(found[0])
    assert found[1:] == [0.04, 0.04]
    assert holm([]) == []
