"""A figure with its interval."""

from __future__ import annotations

import math
from dataclasses import dataclass


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
