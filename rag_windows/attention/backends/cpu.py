"""PyTorch's fused CPU attention, which returns its lse."""

from __future__ import annotations

import torch

from rag_windows.attention.backends.request import Request

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def serves(request: Request) -> bool:
    """Whether the kernel computes this request (no soft cap, one head size)."""
    return (
        request.softcap is None
        and request.key.shape[-1] == request.value.shape[-1]
        and request.query.dtype in DTYPES
        and request.key.shape[2] > 0
    )


def attend(request: Request) -> tuple[torch.Tensor, torch.Tensor]:
    """Same contract as the reference."""
    groups = request.query.shape[1] // request.key.shape[1]
    if groups == 1 or request.causal or request.mask is not None:
        return _attend(request, request.query)
    # The kernel reads keys once for each head that it is given; as rows, heads share one reading.
    batch, heads, rows, dim = request.query.shape
    folded = request.query.reshape(batch, heads // groups, groups * rows, dim)
    output, lse = _attend(request, folded)
    return output.reshape(batch, heads, rows, dim), lse.reshape(batch, heads, rows)


def _attend(request: Request, query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    bias = None
    if request.mask is not None:
        bias = torch.zeros(request.mask.shape, dtype=request.query.dtype)
        bias = bias.masked_fill(~request.mask, -torch.inf)
    twice = query.shape[2] == 1 and query.dtype == torch.bfloat16
    twice = twice and bias is None and not request.causal
    if twice:
        # Its matrix product with a vector takes twice the time of one with two columns.
        query = query.expand(-1, -1, 2, -1)
    output, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query,
        request.key,
        request.value,
        0.0,
        request.causal,
        attn_mask=bias,
        scale=request.scale / request.temperature,
    )
    if request.mask is not None:
        # The kernel reports 0 instead of -inf for a row that sees nothing.
        lse = lse.masked_fill(~request.mask.any(dim=-1), -torch.inf)
    return (output[:, :, :1], lse[:, :, :1]) if twice else (output, lse)
