"""Keys and values of windows: of one, and of all those that one query reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rag_windows.adjacency import side_by_side


@dataclass(frozen=True, slots=True)
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


@dataclass(frozen=True, slots=True)
class PackedWindows:
    """All windows of one query, packed along the token axis without padding.

    Attributes:
        keys: per layer, (kv heads, N, head dim) on that layer's device; N is the total length.
        values: per layer, (kv heads, N, value dim).
        positions: (N,) int64, on the first layer's device.
        groups: (N,) int64, there too; the citation group (a passage) that each token counts for.
        n_groups: number of citation groups.
        first_position: the smallest position of any token.
        count: how many windows these are.
        shares: (N, n_groups) fp32, there too, where a token counts for several groups: the share of
            each, and `groups` says nothing; None where each counts for its own.
    """

    keys: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...]
    positions: torch.Tensor
    groups: torch.Tensor
    n_groups: int
    first_position: int
    count: int
    shares: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class RowWindows:
    """Windows of which each batch row reads its own, padded on the right.

    Attributes:
        keys: per layer, (rows, kv heads, longest, head dim) on that layer's device.
        values: per layer, (rows, kv heads, longest, value dim).
        positions: (rows, longest) int64, on the first layer's device.
        present: (rows, longest) bool, there too; False for padding.
        full: whether nothing is padding, so that nothing needs a mask.
    """

    keys: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...]
    positions: torch.Tensor
    present: torch.Tensor
    full: bool = False


def rows_of(windows: Sequence[Window]) -> RowWindows:
    """Windows as rows of one batch, in the order given; at least one that has tokens."""
    lengths = torch.tensor([len(w.ids) for w in windows])
    starts = torch.tensor([w.start for w in windows])
    index = torch.arange(int(lengths.max()))
    device = windows[0].keys[0].device

    def padded(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        longest = len(index)
        return torch.stack(
            [torch.nn.functional.pad(t, (0, 0, 0, longest - t.shape[1])) for t in tensors]
        )

    layers = range(len(windows[0].keys))
    return RowWindows(
        keys=tuple(padded([w.keys[i] for w in windows]) for i in layers),
        values=tuple(padded([w.values[i] for w in windows]) for i in layers),
        positions=(starts.unsqueeze(-1) + index).to(device),
        present=(index < lengths.unsqueeze(-1)).to(device),
        full=int(lengths.min()) == len(index),
    )


def pack(windows: Sequence[Window], groups: torch.Tensor, n_groups: int) -> PackedWindows:
    """Put windows side by side, once per request; no decoded token copies them again.

    Args:
        windows: at least one.
        groups: (N,) int64, the citation group of each token of all windows.
        n_groups: number of groups; a group without tokens gets no mass.
    """
    layers = range(len(windows[0].keys))
    device = windows[0].keys[0].device
    positions = [torch.arange(w.start, w.start + len(w.ids)) for w in windows]
    return PackedWindows(
        keys=tuple(side_by_side([w.keys[i] for w in windows]) for i in layers),
        values=tuple(side_by_side([w.values[i] for w in windows]) for i in layers),
        positions=torch.cat(positions).to(device),
        groups=groups.to(device),
        n_groups=n_groups,
        first_position=min(w.start for w in windows),
        count=len(windows),
    )
