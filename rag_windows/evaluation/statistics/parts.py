"""What a metric adds up over the examples, so that it can be had for any draw of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Formula = Callable[[Array], Array]


@dataclass(frozen=True, slots=True)
class Parts:
    """Figures of each example that are added up, and the metric from the sums.

    Every metric of a corpus that is computed from sums has this form; a mean adds up values and
    counts. Bootstraps and permutations then need sums alone.

    Attributes:
        rows: one an example, all of the same length k.
        formula: (..., k) sums to (...) percent; NaN where there is nothing to divide by. It warns
            of nothing.
    """

    rows: tuple[tuple[float, ...], ...]
    formula: Formula

    @classmethod
    def of_mean(cls, values: Sequence[float | None]) -> Parts:
        """Those of the mean of the values that are not None."""
        rows = tuple((0.0, 0.0) if one is None else (float(one), 1.0) for one in values)
        return cls(rows, ratio)

    @classmethod
    def of_means(cls, *columns: Sequence[float | None]) -> Parts:
        """Those of the plain mean of several such means, each over the examples that it counts."""
        pairs = (cls.of_mean(column).rows for column in columns)
        return cls(tuple(sum(row, ()) for row in zip(*pairs, strict=True)), mean_of_ratios)

    @property
    def array(self) -> Array:
        """(examples, k)."""
        width = len(self.rows[0]) if self.rows else 0
        return np.array(self.rows, dtype=np.float64).reshape(len(self.rows), width)


def ratio(sums: Array) -> Array:
    """First sum by the second; NaN where that is 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(sums[..., 1] == 0, np.nan, sums[..., 0] / sums[..., 1])


def mean_of_ratios(sums: Array) -> Array:
    """Mean over k / 2 pairs of the first by the second; NaN where one of those is 0."""
    pairs = sums.reshape(*sums.shape[:-1], -1, 2)
    return ratio(pairs).mean(axis=-1)
