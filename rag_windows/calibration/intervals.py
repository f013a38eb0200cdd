"""Means with bootstrap intervals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

RESAMPLES = 2000


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
    values = torch.tensor(rows, dtype=torch.float64)
    count = values.shape[1]
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(count, (resamples, count), generator=generator)
    # How often each example is drawn: one matrix product instead of a gather for every row.
    weights = torch.zeros(resamples, count, dtype=torch.float64)
    weights.scatter_add_(1, drawn, torch.ones_like(drawn, dtype=torch.float64))
    means = values @ weights.T / count
    ends = torch.quantile(means, torch.tensor([0.025, 0.975], dtype=torch.float64), dim=1)
    return [
        Mean(value, low, high)
        for value, low, high in zip(
            values.mean(dim=1).tolist(), ends[0].tolist(), ends[1].tolist(), strict=True
        )
    ]
