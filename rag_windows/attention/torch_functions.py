"""PyTorch's attention function for CUDA devices, as its versions from 2.11 on have it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import torch


@cache
def _varlen_attn() -> Callable[..., Any]:
    # Imported where it is used: it takes two seconds.
    from torch.nn.attention.varlen import AuxRequest, varlen_attn

    if "seqused_k" in inspect.signature(varlen_attn).parameters:
        aux = AuxRequest(lse=True)
        return lambda *asked, **options: varlen_attn(*asked, return_aux=aux, **options)
    return _flash


def _flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `varlen_attn` calls; before torch 2.13 that hands neither of the last two on.

    Grouped heads need no word of their own here.
    """
    output, lse, *_ = torch.ops.aten._flash_attention_forward(
        *(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k),
        *(0.0, window_size == (-1, 0), False),
        scale=scale,
        window_size_left=window_size[0],
        window_size_right=window_size[1],
        seqused_k=seqused_k,
    )
    return output, lse


def varlen(*asked: Any, **options: Any) -> Any:
    """`torch.nn.attention.varlen.varlen_attn` of torch 2.13, with log-sum-exps."""
    return _varlen_attn()(*asked, **options)
