"""The KV cache of ensembles, whose rows belong to queries and windows."""

from __future__ import annotations

import torch
from transformers import DynamicCache, PreTrainedModel

from rag_windows.attention.layers import CACHE


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

    def read(
        self, model: PreTrainedModel, ids: torch.Tensor, positions: torch.Tensor, last: int
    ) -> torch.Tensor:
        """One forward pass of all rows, which this cache takes in.

        Args:
            model: that reads.
            ids: (queries, tokens) int64.
            positions: (queries, tokens) int64.
            last: of how many last tokens logits are wanted.

        Returns:
            Logits (queries x rows of each, last, vocabulary) in the model's dtype.
        """
        output = model(
            ids.repeat_interleave(self.per_query, dim=0),
            position_ids=positions.repeat_interleave(self.per_query, dim=0),
            use_cache=True,
            logits_to_keep=last,
            **{CACHE: self},
        )
        return torch.as_tensor(output.logits)[:, -last:]

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
