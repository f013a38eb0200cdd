"""Intervals and tests for what was measured on the same questions with several methods.

Data come in groups that go together, as the turns of a conversation do, so whole groups are drawn
again (A. C. Davison, D. V. Hinkley, Bootstrap Methods and their Application, 1997, section 3.8) or
exchanged between two methods (E. W. Noreen 1989; S. Riezler, J. T. Maxwell 2005). A group's
observation is the sums of its metric's rows.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import stats

from rag_windows.evaluation.task import Array, Formula

RESAMPLES = 2000
PERMUTATIONS = 9_999
SEED = 20260
MOST_LOST = 0.01
"""Share of draws without a value above which there is no interval: the rest would be a choice."""

_BATCH = 250


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure with its 95% interval.

    Attributes:
        value: NaN where there is nothing to compute it from.
        low: 2.5th percentile of the values of resampled data; NaN where there is no interval.
        high: likewise the 97.5th.
    """

    value: float
    low: float = math.nan
    high: float = math.nan

    @property
    def bounded(self) -> bool:
        """Whether there is an interval."""
        return not math.isnan(self.low)


def group_sums(rows: Array, groups: Sequence[str]) -> Array:
    """(examples, ...) to (groups, ...): what the examples of each group add up to."""
    numbers = {name: number for number, name in enumerate(dict.fromkeys(groups))}
    sums = np.zeros((len(numbers), *rows.shape[1:]))
    np.add.at(sums, [numbers[name] for name in groups], rows)
    return sums


def bootstrap(sums: Array, formula: Formula) -> tuple[Array, Array | None]:
    """A metric in several columns, such as arms, and its values for draws of whole groups.

    Args:
        sums: (groups, columns, k).
        formula: (..., k) sums to (...) percent.

    Returns:
        Values, (columns,), and drawn values, (columns, draws), the same draws for all columns;
        None for those where there are fewer than two groups.
    """
    groups = len(sums)
    flat = sums.reshape(groups, -1)

    def statistic(places: npt.NDArray[np.intp], axis: int = -1) -> Array:
        drawn = np.moveaxis(places, axis, -1).reshape(-1, groups)
        counts = np.zeros(drawn.shape)
        np.add.at(counts, (np.arange(len(drawn))[:, None], drawn), 1.0)
        values = formula((counts @ flat).reshape(len(drawn), *sums.shape[1:])).T
        return values if places.ndim > 1 else values[:, 0]

    places = np.arange(groups)
    if groups < 2:
        return statistic(places), None
    with warnings.catch_warnings(), np.errstate(invalid="ignore"):
        # Of columns without a value, whose intervals are not used.
        warnings.simplefilter("ignore")
        found = stats.bootstrap(
            (places,),
            statistic,
            n_resamples=RESAMPLES,
            batch=_BATCH,
            method="percentile",
            vectorized=True,
            rng=np.random.default_rng(SEED),
        )
    return statistic(places), found.bootstrap_distribution


def estimate(value: float, drawn: Array | None) -> Estimate:
    """A value with the percentiles of its drawn values; those not finite are left out."""
    value = _settled(value).item()
    if drawn is None or math.isnan(value) or np.mean(~np.isfinite(drawn)) > MOST_LOST:
        return Estimate(value)
    low, high = np.percentile(_settled(drawn[np.isfinite(drawn)]), (2.5, 97.5))
    return Estimate(value, float(low), float(high))


def percent(values: Any, bases: Any) -> Array:
    """Values in percent of others; NaN where those are 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(bases == 0, np.nan, 100 * values / bases)


def _settled(values: Any) -> Array:
    """Without the last bits, in which equal answers differ where sums come in another order."""
    return np.asarray(np.round(values, 10) + 0.0)


def p_values(sums: Array, base: int, formula: Formula) -> list[float]:
    """Two-sided p values of every arm against one of them.

    If two methods were alike, their answers to a group's questions could as well have been
    exchanged. Exact where there are few ways to exchange; else some are drawn, and the observed one
    counts beside them (B. Phipson, G. K. Smyth 2010), so that p is never 0.

    Args:
        sums: (groups, arms, k).
        base: place of the arm compared with.
        formula: (..., k) sums to (...) percent.

    Returns:
        One an arm: 1 for the base; NaN where an arm or the base has no value.
    """
    groups, arms, size = sums.shape
    values = formula(sums.sum(axis=0))
    unknown = np.isnan(values - values[base])
    if groups < 2:
        return np.where(unknown, np.nan, 1.0).tolist()
    change = (sums[:, [base]] - sums).reshape(groups, -1)
    whole = sums.sum(axis=0)

    def apart(own: npt.NDArray[np.intp], _: Any, axis: int = -1) -> Array:
        # Places from 0 are an arm's own answers, and those behind them the base's.
        exchanged = np.moveaxis(own, axis, -1) >= groups
        moved = (exchanged @ change).reshape(*exchanged.shape[:-1], arms, size)
        found = np.abs(formula(whole + moved) - formula(whole[base] - moved))
        # What can't be computed for an exchange counts against a difference.
        return np.where(unknown, 0.0, np.nan_to_num(np.round(found, 9), nan=np.finfo(float).max))

    places = np.arange(groups)
    tested = stats.permutation_test(
        (places, places + groups),
        apart,
        permutation_type="samples",
        alternative="greater",
        n_resamples=PERMUTATIONS,
        batch=_BATCH,
        vectorized=True,
        rng=np.random.default_rng(SEED),
    )
    return np.where(unknown, np.nan, tested.pvalue).tolist()


def holm(p: Sequence[float]) -> list[float]:
    """S. Holm's step-down correction (Scandinavian Journal of Statistics 1979).

    Rejecting what stays below a level errs with at most that chance in the whole family. scipy has
    corrections of the false discovery rate only.

    Args:
        p: of one family; NaN stays NaN and is no member.
    """
    members = sorted((value, place) for place, value in enumerate(p) if not math.isnan(value))
    corrected, highest = list(p), 0.0
    for rank, (value, place) in enumerate(members):
        highest = max(highest, min(1.0, value * (len(members) - rank)))
        corrected[place] = highest
    return corrected
