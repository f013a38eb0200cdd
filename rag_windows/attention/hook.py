"""The attention that transformers calls: the tail by itself, the windows beside it, one merge."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface

from rag_windows.attention.backends import Request
from rag_windows.attention.beside import attend_beside
from rag_windows.attention.layout import Layout, current_layout
from rag_windows.attention.mix import mix
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
    kind = query.device.type
    if torch.is_autocast_enabled(kind):
        # As autocast does it with PyTorch's attention; the arithmetic inside chooses its own types.
        dtype = torch.get_autocast_dtype(kind)
        query, key, value = (
            tensor if tensor.dtype is torch.float64 else tensor.to(dtype)
            for tensor in (query, key, value)
        )
        with torch.autocast(kind, enabled=False):
            return windowed_attention(
                module,
                query,
                key,
                value,
                attention_mask,
                scaling=scaling,
                softcap=softcap,
                s_aux=s_aux,
                position_bias=position_bias,
            )
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
    if layout.override is not None:
        mixed = layout.override.attend(
            layout, layer, query, key, value, scale=scale, softcap=softcap, sinks=s_aux
        )
        return mixed.transpose(1, 2).contiguous(), None
    tail = tail_requests(layout, layer, query, key, value, scale, softcap)
    context = beside = None
    if layout.windows is not None:
        context = _context_request(layout, layout.windows, layer, query, key, scale, softcap)
    if layout.beside is not None:
        beside = attend_beside(layout, layout.beside, layer, query, key.shape[2], scale, softcap)
    mixed = mix(layout, layer, query, tail, context, beside, s_aux)
    return mixed.transpose(1, 2).contiguous(), None


def tail_requests(
    layout: Layout,
    layer: int,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    softcap: float | None,
) -> list[Request]:
    """The tail as one segment, or prefix and query as two where the query is weighed by itself."""
    length = key.shape[2]
    border = layout.prefix_length if layout.query_bias else 0
    parts = [(0, border), (border, length)] if border else [(0, length)]
    return [
        Request(
            query,
            key if border == 0 else key[:, :, first:last],
            value if border == 0 else value[:, :, first:last],
            scale,
            softcap=softcap,
            causal=_causal(layout, layer, query.shape[2], first, last, length),
            mask=_tail_mask(layout, layer, query, first, last, length),
        )
        for first, last in parts
    ]


def _causal(layout: Layout, layer: int, rows: int, first: int, last: int, length: int) -> bool:
    """Whether a part of the tail is the newest rows themselves, which kernels can mask alone."""
    square = first == length - rows and last == length and rows > 1
    return square and not _out_of_reach(layout, layer, first, length)


def _tail_mask(
    layout: Layout, layer: int, query: torch.Tensor, first: int, last: int, length: int
) -> torch.Tensor | None:
    """Which keys of a part of the tail each row sees; None where a kernel needs no mask."""
    rows = query.shape[2]
    reach = layout.reach[layer]
    near = not _out_of_reach(layout, layer, first, length)
    if near and (last - 1 <= length - rows or _causal(layout, layer, rows, first, last, length)):
        return None
    index = torch.arange(length, device=query.device)
    mask = index[first:last] <= index[length - rows :].unsqueeze(-1)
    if reach is None or near:
        return mask
    positions = layout.positions(length, query.device)
    distance = positions[..., length - rows :].unsqueeze(-1) - positions[..., None, first:last]
    mask = mask & (distance < reach)
    return mask if mask.dim() == 2 else mask.unsqueeze(1)


def _out_of_reach(layout: Layout, layer: int, first: int, length: int) -> bool:
    """Whether some row may be too far from the tail's ``first`` token."""
    reach = layout.reach[layer]
    if reach is None:
        return False
    # Behind the prefix all positions of a row move together.
    behind = first >= layout.prefix_length
    span = length - 1 - first if behind else layout.furthest(length) - first
    return span >= reach


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
    if batch == 1:
        folded = query.reshape(1, kv_heads, heads // kv_heads * rows, -1)
    else:
        grouped = query.unflatten(1, (kv_heads, heads // kv_heads))
        folded = grouped.transpose(0, 1).flatten(1, 3).unsqueeze(0)
    reach, length = layout.reach[layer], key.shape[2]
    mask = None
    if reach is not None and layout.furthest(length) - windows.first_position >= reach:
        row_positions = layout.positions(length, key.device)[..., length - rows :]
        distance = row_positions.unsqueeze(-1) - windows.positions.to(key.device)
        seen = (distance < reach).expand(batch, rows, -1)
        mask = seen.repeat_interleave(heads // kv_heads, dim=0).flatten(0, 1)
    return Request(
        folded,
        # Of another type only where one of both was computed under autocast.
        windows.keys[layer].unsqueeze(0).to(query.dtype),
        windows.values[layer].unsqueeze(0).to(query.dtype),
        scale,
        temperature=layout.method.temperature,
        softcap=softcap,
        mask=mask,
    )
