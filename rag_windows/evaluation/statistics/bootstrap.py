"""Intervals of several methods' values, differences and ratios on the same examples."""

from __future__ import annotations

import numpy as np

from rag_windows.evaluation.statistics.estimate import Estimate
from rag_windows.evaluation.statistics.parts import Array, Formula
from rag_windows.evaluation.statistics.resampling import RESAMPLES, drawn_sums, interval

MOST_LOST = 0.01
"""Share of draws without a value above which there is no interval: the rest would be a choice."""


class Bootstrap:
    """One metric of several arms; whole groups are drawn, the same for all arms.

    With fewer than two groups there is a value and no interval.

    Args:
        sums: (groups, arms, k), of the metric's parts over each group's examples.
        formula: (..., k) sums to (...) percent.
        resamples: how many draws.
    """

    def __init__(self, sums: Array, formula: Formula, resamples: int = RESAMPLES) -> None:
        self.values: Array = formula(sums.sum(axis=0))
        self._drawn: Array | None = None
        if len(sums) > 1:
            self._drawn = formula(drawn_sums(sums, resamples))

    def value(self, arm: int) -> Estimate:
        """That of an arm, percent."""
        drawn = None if self._drawn is None else self._drawn[:, arm]
        return _estimate(float(self.values[arm]), drawn)

    def difference(self, arm: int, base: int) -> Estimate:
        """An arm minus the base, percentage points."""
        drawn = None
        if self._drawn is not None:
            drawn = _settled(self._drawn[:, arm] - self._drawn[:, base])
        return _estimate(float(_settled(self.values[arm] - self.values[base])), drawn)

    def retention(self, arm: int, base: int) -> Estimate:
        """Percent of the base's value; NaN where that is 0."""
        drawn = None
        if self._drawn is not None:
            drawn = _percent(self._drawn[:, arm], self._drawn[:, base])
        return _estimate(float(_percent(self.values[arm], self.values[base])), drawn)


def _percent(values: Array, bases: Array) -> Array:
    with np.errstate(divide="ignore", invalid="ignore"):
        return _settled(np.where(bases == 0, np.nan, 100 * values / bases))


def _settled(values: Array) -> Array:
    """Without the last bits, in which equal answers differ where sums come in another order."""
    return np.round(values, 10) + 0.0


def _estimate(value: float, drawn: Array | None) -> Estimate:
    if drawn is None or np.isnan(value) or np.mean(~np.isfinite(drawn)) > MOST_LOST:
        return Estimate(value)
    return interval(value, drawn)
