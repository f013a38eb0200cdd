"""Several windows as one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch

from rag_windows.kv import PackedWindows, Window, pack

Fusion = Literal["concat", "mean", "sum"]


def fuse(windows: Sequence[Window], fusion: Fusion) -> Window:
    """One window whose keys and values at a position are the mean or the sum of those there.

    Windows of unlike lengths are laid over each other position by position; where a shorter one
    has no token, the mean and the sum are over those that have one. Keys are rotated already, but
    those that are mixed stand at the same position and are rotated alike.

    Args:
        windows: at least one.
        fusion: "mean" or "sum".

    Returns:
        From the first position of any to the last. Its tokens stand for nothing but their number.
    """
    start = min(window.start for window in windows)
    length = max(window.start + len(window.ids) for window in windows) - start

    def mixed(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        first = tensors[0]
        exact = torch.promote_types(first.dtype, torch.float32)
        total = first.new_zeros((first.shape[0], length, first.shape[2]), dtype=exact)
        for window, tensor in zip(windows, tensors, strict=True):
            at = window.start - start
            total[:, at : at + len(window.ids)] += tensor.to(exact)
        if fusion == "mean":
            total = total / _present(windows, start, length).sum(dim=0).to(total).view(1, -1, 1)
        return total.to(first.dtype)

    layers = range(len(windows[0].keys))
    return Window(
        ids=(0,) * length,
        start=start,
        keys=tuple(mixed([window.keys[layer] for window in windows]) for layer in layers),
        values=tuple(mixed([window.values[layer] for window in windows]) for layer in layers),
    )


def pack_fused(
    fused: Window, windows: Sequence[Window], groups: Sequence[int], n_groups: int
) -> PackedWindows:
    """A fused window as the one that is read; passages share the attention on a position.

    Positions at which the same passages have a token are one span.

    Args:
        fused: from `fuse`.
        windows: what it was made from.
        groups: citation group of each of these.
        n_groups: number of groups.
    """
    present = _present(windows, fused.start, len(fused.ids))
    same, counts = present.T.unique_consecutive(dim=0, return_counts=True)
    shares = torch.zeros(len(counts), n_groups)
    shares.index_add_(1, torch.tensor(list(groups)), same.float())
    packed = pack([fused], [0] * len(counts), n_groups, counts.tolist())
    return replace(packed, shares=shares / shares.sum(dim=1, keepdim=True))


def _present(windows: Sequence[Window], start: int, length: int) -> torch.Tensor:
    """(windows, length) bool: which window has a token at which position behind ``start``."""
    index = torch.arange(start, start + length)
    first = torch.tensor([window.start for window in windows]).unsqueeze(-1)
    end = torch.tensor([window.start + len(window.ids) for window in windows]).unsqueeze(-1)
    return (index >= first) & (index < end)
