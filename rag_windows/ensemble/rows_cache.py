"""The tail of an ensemble: what looks like one row a query holds a row for each window."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import DynamicCache


class RowsCache(DynamicCache):
    """An HF cache whose batch is queries x windows, query after query.

    Whoever reorders, repeats or selects its batch (beam search, several answers a prompt, scoring)
    names queries; their rows move together.

    Args:
        per_query: rows of each query.
    """

    def __init__(self, per_query: int) -> None:
        super().__init__()
        self.per_query = per_query

    def part(self, queries: Sequence[int], length: int) -> RowsCache:
        """A copy of some queries' rows, of the first ``length`` tokens."""
        copy = RowsCache(self.per_query)
        for number, layer in enumerate(self.layers):
            rows = self._rows(torch.tensor(list(queries), device=layer.keys.device))
            copy.update(layer.keys[rows, :, :length], layer.values[rows, :, :length], number)
        return copy

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each query; there is nothing to repeat before the first tokens."""
        if not self.layers:
            return
        queries = torch.arange(len(self.layers[0].keys) // self.per_query)
        self.batch_select_indices(queries.repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep these queries, in this order."""
        super().batch_select_indices(self._rows(indices))

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Put these queries in place of those that are there."""
        super().reorder_cache(self._rows(beam_idx))

    def _rows(self, queries: torch.Tensor) -> torch.Tensor:
        own = torch.arange(self.per_query, device=queries.device)
        return (queries.unsqueeze(-1) * self.per_query + own).flatten()
