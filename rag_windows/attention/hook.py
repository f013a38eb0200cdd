"""The attention that transformers calls: the tail by itself, the windows beside it, one merge."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface

from rag_windows.attention.backends import Request, attend
from rag_windows.attention.layout import Layout, current_layout
from rag_windows.attention.merge import merge, merge_weights
from rag_windows.attention.shares import record_shares
from rag_windows.errors import UnsupportedModelError
from rag_windows.windows import PackedWindows

NAME = "rag_windows"


def register() -> None:
    """Add our two entries to transformers' registries; no other entry changes."""
    AttentionInterface.register(NAME, windowed_attention)
    AttentionMaskInterface.register(NAME, no_mask)


def no_mask(*args: Any, attention_mask: torch.Tensor | None = None, **kwargs: Any) -> None:
    """Leave masks to the hook, which knows positions; our rows are never padded on the left."""


def windowed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of the tail's newest rows over the tail and the windows of the current layout.

    Args:
        module: the attention module; its ``layer_idx`` says which layer's windows to read.
        query: (batch, heads, rows, head dim); the rows are the newest of the tail.
        key: (batch, kv heads, tail, head dim).
        value: (batch, kv heads, tail, value dim).
        attention_mask: must be None: a model that builds its own mask can't be served.
        dropout: ignored; windows are for inference.
        scaling: multiplies the logits; head dim ** -0.5 if None.
        softcap: caps the logits, as Gemma 2 does.
        s_aux: (heads,) logits of attention sinks, as gpt-oss has them.
        position_bias: must be None, as the mask.
        kwargs: what else a model passes; the layout already knows it.

    Returns:
        (batch, rows, heads, value dim) in the query's dtype, and None for the weights.
    """
    if attention_mask is not None or position_bias is not None:
        raise UnsupportedModelError(
            f"{type(module).__name__} adds a mask or position bias of its own to the attention, so "
            "its attention can't be split into windows. Choose a model with rotary or learned "
            "positions."
        )
    layout = current_layout()
    layer = int(module.layer_idx)  # type: ignore[arg-type]  # set by every transformers decoder
    if layout.capture is not None:
        layout.capture.keep(layer, key, value)
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    tail = _tail_request(layout, layer, query, key, value, scale, softcap)
    output, lse = attend(tail)
    sink = None if s_aux is None else s_aux.to(lse.dtype).view(1, -1, 1)
    if layout.windows is None and sink is None:
        return output.transpose(1, 2).contiguous(), None
    outputs, lses = [output], [lse]
    context = None
    if layout.windows is not None:
        context = _context_request(layout, layout.windows, layer, query, key, scale, softcap)
        folded_output, folded_lse = attend(context)
        context_lse = _unfold(folded_lse, query)
        outputs.append(_unfold(folded_output, query))
        lses.append(layout.method.context_lse(context_lse))
    weights = merge_weights(lses, sink)
    if layout.mass is not None and context is not None:
        record_shares(layout, layer, tail, context, lse, context_lse, weights)
    return merge(outputs, weights).transpose(1, 2).contiguous(), None


def _tail_request(
    layout: Layout,
    layer: int,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    softcap: float | None,
) -> Request:
    rows, length = query.shape[2], key.shape[2]
    reach = layout.reach[layer]
    if reach is not None and layout.position(length - 1) < reach:
        reach = None
    causal = rows == length and rows > 1 and reach is None
    mask = None
    if reach is not None or (rows > 1 and not causal):
        index = torch.arange(length, device=key.device)
        mask = index <= index[length - rows :].unsqueeze(-1)
        if reach is not None:
            positions = layout.positions(length, key.device)
            mask = mask & (positions[length - rows :].unsqueeze(-1) - positions < reach)
    return Request(query, key, value, scale, softcap=softcap, causal=causal, mask=mask)


def _context_request(
    layout: Layout,
    windows: PackedWindows,
    layer: int,
    query: torch.Tensor,
    key: torch.Tensor,
    scale: float,
    softcap: float | None,
) -> Request:
    """Fold batch rows and query heads of one kv head into rows: all of them read the same keys."""
    batch, heads, rows, _ = query.shape
    kv_heads = windows.keys[layer].shape[0]
    grouped = query.unflatten(1, (kv_heads, heads // kv_heads))
    folded = grouped.transpose(0, 1).flatten(1, 3).unsqueeze(0)
    reach, length = layout.reach[layer], key.shape[2]
    mask = None
    if reach is not None and layout.position(length - 1) - windows.first_position >= reach:
        row_positions = layout.positions(length, key.device)[length - rows :]
        distance = row_positions.unsqueeze(-1) - windows.positions.to(key.device)
        mask = (distance < reach).repeat(batch * (heads // kv_heads), 1)
    return Request(
        folded,
        windows.keys[layer].unsqueeze(0),
        windows.values[layer].unsqueeze(0),
        scale,
        temperature=layout.method.temperature,
        softcap=softcap,
        mask=mask,
    )


def _unfold(folded: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """(1, kv heads, batch * groups * rows, ...) back to (batch, heads, rows, ...)."""
    batch, heads, rows, _ = query.shape
    kv_heads = folded.shape[1]
    split = folded.squeeze(0).unflatten(1, (batch, heads // kv_heads, rows))
    return split.transpose(0, 1).flatten(1, 2)
