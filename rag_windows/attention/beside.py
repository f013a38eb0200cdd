"""The segment of which each batch row reads a window of its own."""

from __future__ import annotations

import torch

from rag_windows.attention.backends import Request, attend
from rag_windows.attention.layout import Layout
from rag_windows.windows import RowWindows


def attend_beside(
    layout: Layout,
    beside: RowWindows,
    layer: int,
    query: torch.Tensor,
    length: int,
    scale: float,
    softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of each batch row over its own window; padding is masked.

    The batch may hold several queries, each with a row a window, query after query. They are
    folded into rows, so that no window is repeated for them.

    Args:
        layout: of this call.
        beside: the windows.
        layer: which layer's keys to read.
        query: (queries * windows, heads, rows, head dim), the newest rows of the tail.
        length: tokens of the tail.
        scale: multiplies the logits.
        softcap: caps them, or None.

    Returns:
        Output (batch, heads, rows, value dim) and lse (batch, heads, rows), as backends give them.
    """
    windows, rows = beside.present.shape[0], query.shape[2]
    queries = query.shape[0] // windows
    folded = query
    if queries > 1:
        folded = query.unflatten(0, (queries, windows)).permute(1, 2, 0, 3, 4).flatten(2, 3)
    request = Request(
        folded,
        beside.keys[layer].to(query.dtype),
        beside.values[layer].to(query.dtype),
        scale,
        softcap=softcap,
        mask=_mask(layout, beside, layer, rows, queries, length, query.device),
    )
    output, lse = attend(request)
    if queries == 1:
        return output, lse
    output = output.unflatten(2, (queries, rows)).permute(2, 0, 1, 3, 4).flatten(0, 1)
    return output, lse.unflatten(2, (queries, rows)).permute(2, 0, 1, 3).flatten(0, 1)


def _mask(
    layout: Layout,
    beside: RowWindows,
    layer: int,
    rows: int,
    queries: int,
    length: int,
    device: torch.device,
) -> torch.Tensor | None:
    """Bool (windows, 1, queries * rows, longest), or None where every row sees its whole window."""
    reach = layout.reach[layer]
    if reach is None and beside.full:
        return None
    mask = beside.present.to(device)[:, None, None]
    if reach is None:
        return mask.expand(-1, -1, queries * rows, -1)
    tail = layout.positions(length, device)[..., length - rows :]
    distance = tail.unsqueeze(-1) - beside.positions.to(device).unsqueeze(1)
    return (mask & (distance < reach).unsqueeze(1)).repeat(1, 1, queries, 1)
