"""Containers of keys and values: one window, all that a query reads, the KV caches of ensembles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from transformers import DynamicCache


def follows(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether the tokens of the other (heads, tokens, dim) tensor stand right behind the one's."""
    return (
        other.untyped_storage().data_ptr() == one.untyped_storage().data_ptr()
        and other.storage_offset() == one.storage_offset() + one.shape[1] * one.stride(1)
        and other.stride() == one.stride()
        and other.shape[::2] == one.shape[::2]
    )


def side_by_side(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """(heads, tokens, dim) tensors joined along the tokens; a view where they stand on a shelf."""
    if not all(follows(one, other) for one, other in pairwise(tensors)):
        return torch.cat(list(tensors), dim=1)
    first = tensors[0]
    tokens = sum(tensor.shape[1] for tensor in tensors)
    return first.as_strided((first.shape[0], tokens, first.shape[2]), first.stride())


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Window:
    """One encoded window.

    It depends only on the model, the prefix, the window's own tokens and position, and how the
    method encodes windows, so it can be reused in any order and for any question.

    Attributes:
        ids: its tokens.
        start: position of its first token: the prefix's length, or further where windows are not
            aligned on the left.
        keys: per layer, (kv heads, tokens, head dim), in the model's dtype, rotated.
        values: per layer, (kv heads, tokens, value dim).
    """

    ids: tuple[int, ...]
    start: int
    keys: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...]

    @property
    def end(self) -> int:
        """Position behind its last token."""
        return self.start + len(self.ids)


@dataclass(frozen=True, slots=True)
class PackedWindows:
    """All windows of one query, packed along the token axis without padding.

    Attributes:
        keys: per layer, (kv heads, N, head dim) on that layer's device; N is the total length.
        values: per layer, (kv heads, N, value dim).
        positions: (N,) int64, on the CPU.
        count: how many windows these are.
        spans: lengths, which add up to N, of stretches whose attention is told apart.
        span_groups: (spans, groups) fp32, on the CPU: for which citation groups the attention
            on a span counts, and how much for each.
    """

    keys: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...]
    positions: torch.Tensor
    count: int
    spans: tuple[int, ...]
    span_groups: torch.Tensor

    @property
    def n_groups(self) -> int:
        """Number of citation groups."""
        return self.span_groups.shape[1]


def pack(
    windows: Sequence[Window],
    groups: Sequence[int],
    n_groups: int,
    spans: Sequence[int] | None = None,
) -> PackedWindows:
    """Put windows side by side, once per request; no decoded token copies them again.

    Args:
        windows: at least one.
        groups: the citation group of each span.
        n_groups: number of groups; a group without a span gets no attention.
        spans: lengths that add up to those of the windows; by default the windows' own.
    """
    layers = range(len(windows[0].keys))
    positions = [torch.arange(window.start, window.end) for window in windows]
    span_groups = torch.zeros(len(groups), n_groups)
    span_groups[torch.arange(len(groups)), torch.tensor(list(groups), dtype=torch.int64)] = 1.0
    return PackedWindows(
        keys=tuple(side_by_side([w.keys[i] for w in windows]) for i in layers),
        values=tuple(side_by_side([w.values[i] for w in windows]) for i in layers),
        positions=torch.cat(positions),
        count=len(windows),
        spans=tuple(len(w.ids) for w in windows) if spans is None else tuple(spans),
        span_groups=span_groups,
    )


class Shelf:
    """Windows of given lengths side by side in memory, so that no query copies them again.

    Each forward pass is copied in as it ends, and its own tensors go: at no time are there two of
    all keys and values.
    """

    def __init__(self, lengths: Sequence[int]) -> None:
        self._ends = tuple(accumulate(lengths))
        self._starts = (0, *self._ends[:-1])
        self._keys: list[torch.Tensor] = []
        self._values: list[torch.Tensor] = []

    def put(self, index: int, window: Window) -> Window:
        """Copy a window in; returns the same window, standing on the shelf."""
        place = slice(self._starts[index], self._ends[index])
        keys = self._copied(self._keys, place, window.keys)
        values = self._copied(self._values, place, window.values)
        return Window(window.ids, window.start, keys, values)

    def _copied(
        self, shelf: list[torch.Tensor], place: slice, tensors: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        if not shelf:
            shelf += [one.new_empty(one.shape[0], self._ends[-1], one.shape[2]) for one in tensors]
        return tuple(whole[:, place].copy_(one) for whole, one in zip(shelf, tensors, strict=True))


@dataclass(frozen=True, slots=True)
class Members:
    """Windows of an ensemble, which answer each for itself, each beside a batch row of its own.

    Attributes:
        windows: in order; with a prior, one batch row more reads no window.
        prior: whether there is that further row.
        fixed: (count,) fp32 weights that no step changes, or None.
        groups: (count,) int64, the citation group of each window.
        n_groups: number of citation groups.
    """

    windows: tuple[Window, ...]
    prior: bool
    fixed: torch.Tensor | None
    groups: torch.Tensor
    n_groups: int

    @property
    def count(self) -> int:
        """How many windows these are."""
        return len(self.windows)

    @property
    def per_query(self) -> int:
        """Batch rows that one query takes."""
        return self.count + self.prior


class RowsCache(DynamicCache):
    """An HF cache whose batch is queries x windows, ``per_query`` rows of each query together.

    Whoever reorders, repeats or selects its batch (beam search, several answers a prompt, scoring)
    names queries; their rows move together.
    """

    def __init__(self, per_query: int) -> None:
        super().__init__()
        self.per_query = per_query

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
