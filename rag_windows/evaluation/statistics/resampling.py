"""Drawing data again: how often each of them is drawn, and the ends of what comes out.

The bootstrap (B. Efron, Annals of Statistics 1979), by percentiles. Where data come in groups that
go together, as the turns of a conversation do, whole groups are drawn (A. C. Davison, D. V.
Hinkley, Bootstrap Methods and their Application, 1997, section 3.8). `scipy.stats.bootstrap` draws
single observations, and one statistic at a time; here a draw is a row of counts, and one matrix
product gives the sums of all methods and metrics for all draws.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from rag_windows.evaluation.statistics.estimate import Estimate
from rag_windows.evaluation.statistics.parts import Array

RESAMPLES = 2000
SEED = 20260
_ENDS = (2.5, 97.5)
_BLOCK_BYTES = 32 * 2**20


def generator(groups: int, stream: int = 0) -> np.random.Generator:
    """Private random numbers, equal for equal arguments."""
    return np.random.default_rng([SEED, groups, stream])


def draw(groups: int, resamples: int, rng: np.random.Generator) -> Array:
    """(resamples, groups): how often each group is among as many drawn with replacement."""
    chances = np.full(groups, 1 / groups)
    return rng.multinomial(groups, chances, size=resamples).astype(np.float64)


def count_drawn(drawn: npt.NDArray[np.int64]) -> Array:
    """The same from places drawn by other random numbers, (resamples, groups) from 0."""
    resamples, groups = drawn.shape
    offsets = np.arange(resamples)[:, None] * groups
    counts = np.bincount((drawn + offsets).ravel(), minlength=drawn.size)
    return counts.reshape(resamples, groups).astype(np.float64)


def blocks(rows: int, columns: int) -> Iterator[int]:
    """Numbers of rows that add up to ``rows``, so that no block of float64 is large."""
    most = max(1, _BLOCK_BYTES // (8 * columns))
    while rows > 0:
        yield min(most, rows)
        rows -= most


def drawn_sums(sums: Array, resamples: int = RESAMPLES) -> Array:
    """Sums over draws of whole groups.

    Args:
        sums: (groups, ...), at least one group.
        resamples: how many draws.

    Returns:
        (resamples, ...); every column has the same draws, and the next call has them again.
    """
    groups = len(sums)
    rng = generator(groups)
    flat = sums.reshape(groups, -1)
    found = [draw(groups, rows, rng) @ flat for rows in blocks(resamples, groups)]
    return np.concatenate(found).reshape(resamples, *sums.shape[1:])


def interval(value: float, resampled: Array) -> Estimate:
    """A value with the percentiles of its resampled values; those not finite are left out."""
    usable = resampled[np.isfinite(resampled)]
    if not usable.size:
        return Estimate(value)
    low, high = np.percentile(usable, _ENDS)
    return Estimate(value, float(low), float(high))
