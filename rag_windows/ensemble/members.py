"""The windows of an ensemble: one batch row each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rag_windows.windows import RowWindows, Window, rows_of


@dataclass(frozen=True, slots=True)
class Members:
    """Windows that answer each for itself.

    Attributes:
        rows: one row a window, in order; then, if there is a prior, a row that reads no window.
        count: how many windows these are.
        prior: whether there is that further row.
        fixed: (count,) fp32 weights that no step changes, or None.
        groups: (count,) int64, the citation group of each window.
        n_groups: number of citation groups.
    """

    rows: RowWindows
    count: int
    prior: bool
    fixed: torch.Tensor | None
    groups: torch.Tensor
    n_groups: int

    @property
    def per_query(self) -> int:
        """Batch rows that one query takes."""
        return self.count + self.prior


def members_of(
    windows: Sequence[Window],
    groups: Sequence[int],
    n_groups: int,
    fixed: torch.Tensor | None,
    *,
    prior: bool,
) -> Members:
    """Lay windows out as rows.

    Args:
        windows: at least one.
        groups: citation group of each.
        n_groups: number of groups.
        fixed: see `Members`.
        prior: whether a row without a window is wanted.
    """
    first = windows[0]
    nothing = Window(
        ids=(),
        start=first.start,
        keys=tuple(key[:, :0] for key in first.keys),
        values=tuple(value[:, :0] for value in first.values),
    )
    return Members(
        rows=rows_of([*windows, nothing] if prior else windows),
        count=len(windows),
        prior=prior,
        fixed=fixed,
        groups=torch.tensor(list(groups)),
        n_groups=n_groups,
    )
