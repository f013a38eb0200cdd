"""The attention that transformers calls: it reads what the call's layout says, by segments."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface

from rag_windows.attention.layout import current_layout
from rag_windows.attention.segments import Queries, read
from rag_windows.errors import UnsupportedModelError

NAME = "rag_windows"


def register() -> None:
    """Add our two entries to transformers' registries; no other entry changes."""
    AttentionInterface.register(NAME, windowed_attention)
    AttentionMaskInterface.register(NAME, no_mask)


def no_mask(*args: Any, attention_mask: torch.Tensor | None = None, **kwargs: Any) -> None:
    """Leave masks to the layout, which knows positions; our rows are never padded on the left."""


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
    """Attention of the fed tokens over what the current layout says they read.

    ``query`` is (batch, heads, rows, head dim); ``key`` and ``value`` (batch, kv heads, tokens,
    dim) are those of the KV cache with the fed tokens behind. Logits are multiplied by ``scaling``
    and capped by ``softcap``; ``s_aux`` (heads,) are those of attention sinks. A model with a mask
    or a position bias of its own can't be served; what else it passes is ignored, as dropout is.

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
            extra: dict[str, Any] = {"scaling": scaling, "softcap": softcap, "s_aux": s_aux}
            return windowed_attention(
                module, query, key, value, attention_mask, position_bias=position_bias, **extra
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
    batch, _, rows, dim = query.shape
    reading = layout.reading(layer, batch, rows, key, value)
    asked = Queries(
        layer,
        query.transpose(1, 2).flatten(0, 1),
        reading.rows,
        scaling if scaling is not None else dim**-0.5,
        softcap,
        layout.sliding_windows[layer],
    )
    output, weights = read(reading, asked, s_aux, weights=layout.weighs)
    if weights is not None:
        layout.record(weights, asked)
    return output.unflatten(0, (batch, rows)), None
