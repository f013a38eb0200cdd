"""The KV cache of a query: of its prefix, its own tokens and those of its answer."""

from __future__ import annotations

from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

SPARE = 64
"""Tokens that a layer has room for behind those that it holds, at least."""


class GrowingLayer(DynamicLayer):
    """A layer with spare capacity, so that a token is one write and no copy of all before it.

    ``keys`` and ``values`` (rows, kv heads, tokens, dim) are the used part of larger tensors.
    """

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add tokens, and return all of them; see `DynamicLayer.update`."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            # As many heads and numbers as these have.
            self.keys, self.values = key_states[:, :, :0], value_states[:, :, :0]
        self.keys = self._appended("keys", key_states)
        self.values = self._appended("values", value_states)
        return self.keys, self.values

    def _appended(self, name: str, new: torch.Tensor) -> torch.Tensor:
        held: torch.Tensor = getattr(self, name)
        buffer: torch.Tensor | None = getattr(self, f"_{name}", None)
        tokens, length = held.shape[2], held.shape[2] + new.shape[2]
        # Rows that were repeated, selected or put in another order are tensors of their own.
        own = buffer is not None and held.data_ptr() == buffer.data_ptr()
        if buffer is None or not own or length > buffer.shape[2]:
            capacity = length + max(SPARE, length // 8)
            buffer = new.new_empty(*new.shape[:2], capacity, new.shape[3])
            buffer[:, :, :tokens] = held
            setattr(self, f"_{name}", buffer)
        buffer[:, :, tokens:length] = new
        return buffer[:, :, :length]


class QueryCache(DynamicCache):
    """An HF cache whose layers have spare capacity.

    It has no config on purpose: with one, sliding layers would forget the prefix by counting
    tokens instead of positions.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layer_class_to_replicate = GrowingLayer


class EnsembleCache(QueryCache):
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
