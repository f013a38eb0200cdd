"""The KV cache of ensembles, whose rows belong to queries and windows."""

from __future__ import annotations

import torch
from transformers import DynamicCache


class EnsembleCache(DynamicCache):
    """An HF cache whose batch is queries x windows, ``per_query`` rows of each query together.

    Beam search, several answers a prompt and scoring reorder, repeat or select queries; all rows of
    a query move together. So does ``memory``: tensors by name, queries first, that the combination
    of answers stores between forward passes.
    """

    def __init__(self, per_query: int) -> None:
        super().__init__()
        self.per_query = per_query
        self.memory: dict[str, torch.Tensor] = {}

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each query; there is nothing to repeat before the first tokens."""
        if not self.layers:
            return
        queries = torch.arange(len(self.layers[0].keys) // self.per_query)
        self.batch_select_indices(queries.repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep these queries, in this order."""
        super().batch_select_indices(self._rows(indices))
        self._remember(indices)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Put these queries in place of those that are there."""
        super().reorder_cache(self._rows(beam_idx))
        self._remember(beam_idx)

    def _remember(self, queries: torch.Tensor) -> None:
        for name, tensor in self.memory.items():
            self.memory[name] = tensor[queries.to(tensor.device)]

    def _rows(self, queries: torch.Tensor) -> torch.Tensor:
        own = torch.arange(self.per_query, device=queries.device)
        return (queries.unsqueeze(-1) * self.per_query + own).flatten()
