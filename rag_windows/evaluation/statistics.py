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
    """A figure with the ends of its 95% interval; NaN where there is none."""

    value: float
    low: float = math.nan
    high: float = math.nan

    @property
    def bounded(self) -> bool:
        """Whether there is an interval."""
        return not math.isnan(self.low)


def group_sums(rows: Array, groups: Sequence[str]) -> Array:
    """(examples, ...) to (groups, ...): what the examples of each group add up to."""
    names, numbers = np.unique(groups, return_inverse=True)
    sums = np.zeros((len(names), *rows.shape[1:]))
    np.add.at(sums, numbers, rows)
    return sums


def bootstrap(sums: Array, formula: Formula) -> tuple[Array, Array]:
    """A metric in several columns, such as arms, and its values for draws of whole groups.

    ``sums`` are (groups, columns, k). Values are (columns,), drawn ones (columns, draws), with the
    same draws for all columns; NaN where there are fewer than two groups.
    """
    groups, flat = len(sums), sums.reshape(len(sums), -1)

    def statistic(places: npt.NDArray[np.intp], axis: int = -1) -> Array:
        drawn = np.moveaxis(places, axis, -1).reshape(-1, groups)
        counts = np.zeros(drawn.shape)
        np.add.at(counts, (np.arange(len(drawn))[:, None], drawn), 1.0)
        values = formula((counts @ flat).reshape(len(drawn), *sums.shape[1:])).T
        return values if places.ndim > 1 else values[:, 0]

    values = formula(sums.sum(axis=0))
    if groups < 2:
        return values, np.full((len(values), 1), np.nan)
    with warnings.catch_warnings(), np.errstate(invalid="ignore"):
        # Of columns without a value, whose intervals are not used.
        warnings.simplefilter("ignore")
        found = stats.bootstrap(
            (np.arange(groups),),
            statistic,
            n_resamples=RESAMPLES,
            batch=_BATCH,
            method="percentile",
            vectorized=True,
            rng=np.random.default_rng(SEED),
        )
    return values, found.bootstrap_distribution


def estimate(value: Any, drawn: Array) -> Estimate:
    """A value with the percentiles of its drawn values; those not finite are left out."""
    # Rounded, since equal answers differ in their last bits where sums come in another order.
    value, finite = round(float(value), 10) + 0.0, drawn[np.isfinite(drawn)]
    if math.isnan(value) or len(finite) < (1 - MOST_LOST) * len(drawn):
        return Estimate(value)
    low, high = np.percentile(np.round(finite, 10) + 0.0, (2.5, 97.5))
    return Estimate(value, float(low), float(high))


def percent(values: Any, bases: Any) -> Array:
    """Values in percent of others; NaN where those are 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(bases == 0, np.nan, 100 * values / bases)


def p_values(sums: Array, bases: Sequence[int], formula: Formula) -> list[tuple[float, float]]:
    """Two-sided p values of arms against their bases: each alone, and after Holm's correction.

    If two methods were alike, their answers to a group's questions could as well have been
    exchanged. Exact where there are few ways to exchange; else some are drawn, and the observed one
    counts beside them (B. Phipson, G. K. Smyth 2010), so that p is never 0.

    Args:
        sums: (groups, arms, k).
        bases: places of the arms compared with; a base's own is no test.
        formula: (..., k) sums to (...) percent; p is NaN where an arm or its base has no value.
    """
    groups, arms, size = sums.shape
    whole, others = sums.sum(axis=0), np.array(bases)
    unknown = np.isnan(formula(whole) - formula(whole[others])) | (others == np.arange(arms))
    change = (sums[:, others] - sums).reshape(groups, -1)

    def apart(own: npt.NDArray[np.intp], _: Any, axis: int = -1) -> Array:
        # Places from 0 are an arm's own answers, and those behind them the base's.
        exchanged = np.moveaxis(own, axis, -1) >= groups
        moved = (exchanged @ change).reshape(*exchanged.shape[:-1], arms, size)
        found = np.abs(formula(whole + moved) - formula(whole[others] - moved))
        # What can't be computed for an exchange counts against a difference.
        return np.where(unknown, 0.0, np.nan_to_num(np.round(found, 9), nan=np.finfo(float).max))

    p, places = np.ones(arms), np.arange(groups)
    if groups > 1:
        p = stats.permutation_test(
            (places, places + groups),
            apart,
            permutation_type="samples",
            alternative="greater",
            n_resamples=PERMUTATIONS,
            batch=_BATCH,
            vectorized=True,
            rng=np.random.default_rng(SEED),
        ).pvalue
    alone = np.where(unknown, np.nan, p)
    return list(zip(alone.tolist(), holm(alone), strict=True))


def holm(p: Array) -> list[float]:
    """S. Holm's step-down correction (1979) of one family; NaN stays NaN and is no member.

    scipy has corrections of the false discovery rate only.
    """
    order, corrected = np.argsort(p)[: np.isfinite(p).sum()], p.copy()
    steps = np.maximum.accumulate(p[order] * np.arange(len(order), 0, -1))
    corrected[order] = np.minimum(1.0, steps)
    return corrected.tolist()
