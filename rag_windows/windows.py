"""Keys and values of windows: of one, and of all those that one query reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Window:
    """One encoded window.

    It depends only on the model, the prefix and the window's own tokens, so it can be reused in
    any order and for any question.

    Attributes:
        ids: its tokens.
        start: position of its first token (the prefix's length).
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
    """

    keys: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...]
    positions: torch.Tensor
    groups: torch.Tensor
    n_groups: int
    first_position: int


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
        keys=tuple(torch.cat([w.keys[i] for w in windows], dim=1) for i in layers),
        values=tuple(torch.cat([w.values[i] for w in windows], dim=1) for i in layers),
        positions=torch.cat(positions).to(device),
        groups=groups.to(device),
        n_groups=n_groups,
        first_position=min(w.start for w in windows),
    )
