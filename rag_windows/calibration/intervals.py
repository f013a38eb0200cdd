"""Means with bootstrap intervals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from rag_windows.evaluation.statistics.resampling import RESAMPLES, count_drawn, interval


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean over examples with its 95% interval.

    Attributes:
        value: the mean.
        low: 2.5th percentile of the means of resampled examples.
        high: 97.5th percentile.
    """

    value: float
    low: float
    high: float


def bootstrap(rows: Sequence[Sequence[float]], seed: int, resamples: int = RESAMPLES) -> list[Mean]:
    """Percentile bootstrap (B. Efron, Annals of Statistics 1979) of the mean of each row.

    All rows are resampled alike: entry ``i`` of each belongs to the same example.

    Args:
        rows: of equal lengths, at least one entry each.
        seed: of a private generator.
        resamples: how many.
    """
    if not rows:
        return []
    values = np.array(rows, dtype=np.float64)
    count = values.shape[1]
    # torch's draws and not numpy's: the figures of profiles that stand are from these.
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(count, (resamples, count), generator=generator)
    means = values @ count_drawn(drawn.numpy()).T / count
    found = [
        interval(float(value), one) for value, one in zip(values.mean(axis=1), means, strict=True)
    ]
    return [Mean(one.value, one.low, one.high) for one in found]
