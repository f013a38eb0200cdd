"""Attention mass of windows that each stand beside a row of their own."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rag_windows.attention.backends import Request
from rag_windows.attention.layout import Layout
from rag_windows.attention.shares import prefix_part


def record_row_shares(
    layout: Layout,
    layer: int,
    tail: Sequence[Request],
    tail_lse: torch.Tensor,
    weights: Sequence[torch.Tensor],
) -> None:
    """Record how each answer row's attention splits over its window, the prefix and the query.

    As for windows that stand together, an attention sink counts for nothing.

    Args:
        layout: of this call; its recorder takes (batch, 3) for each row.
        layer: which layer's shares these are.
        tail: (batch, heads, rows) over the tail, or over prefix and query one by one.
        tail_lse: (batch, heads, rows) of the last of these.
        weights: merged weights of those segments and of the row's window, same shape.
    """
    recorder = layout.mass
    if recorder is None:
        return
    rows = tail[-1].query.shape[2]
    length = sum(request.key.shape[2] for request in tail)
    text = torch.stack(tuple(weights)).sum(dim=0).clamp_min(torch.finfo(tail_lse.dtype).tiny)
    *of_tail, of_window = (weight / text for weight in weights)
    for row in range(rows):
        position = layout.position(length - rows + row)
        if position < recorder.first_position:
            continue
        window = of_window[:, :, row].mean(dim=1)
        prefix = torch.zeros_like(window)
        if len(of_tail) > 1:
            prefix = of_tail[0][:, :, row].mean(dim=1)
        elif layout.prefix_length:
            part = prefix_part(layout.prefix_length, tail[0], tail_lse, row)
            prefix = (of_tail[0][:, :, row] * part).mean(dim=1)
        query = (1 - window - prefix).clamp_min(0.0)
        recorder.put(layer, position, torch.stack([window, prefix, query], dim=1))
