"""How much attention each passage got while the answer was written."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


@dataclass(slots=True)
class MassRecorder:
    """Collects, per layer, the attention of the rows that predict answer tokens.

    The row of the query's last token predicts the first answer token, the row of each answer token
    the next one.

    Attributes:
        first_position: position of the query's last token; earlier rows aren't recorded.
        shares: position -> layer -> (batch, n_groups + 2) fp32, averaged over heads: the share of
            each citation group, then of the prefix, then of the query. A row computed again (a
            rejected draft in assisted decoding) replaces what stood there.
    """

    first_position: int
    shares: dict[int, dict[int, torch.Tensor]] = field(default_factory=dict)

    def put(self, layer: int, position: int, share: torch.Tensor) -> None:
        """Record one row of one layer."""
        self.shares.setdefault(position, {})[layer] = share

    def average(self, positions: list[int], batch_rows: list[int]) -> torch.Tensor:
        """Mean over layers and the given (position, batch row) pairs.

        Returns:
            (n_groups + 2,) fp32 on the CPU, summing to one.
        """
        rows = []
        for position, row in zip(positions, batch_rows, strict=True):
            layers = self.shares[position].values()
            rows.append(torch.stack([share[row].cpu() for share in layers]).mean(dim=0))
        mean = torch.stack(rows).mean(dim=0)
        return mean / mean.sum()
