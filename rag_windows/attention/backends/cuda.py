"""PyTorch's fused CUDA attention, which returns its lse."""

from __future__ import annotations

import logging
from functools import cache

import torch

from rag_windows.attention.backends import reference
from rag_windows.attention.backends.request import Request

logger = logging.getLogger(__name__)

MAX_HEAD_DIM = 256


def serves(request: Request) -> bool:
    """Whether the flash kernel computes this request, and does so rightly on this device."""
    return (
        request.softcap is None
        and request.mask is None
        and request.query.dtype in (torch.float16, torch.bfloat16)
        and request.key.shape[-1] == request.value.shape[-1]
        and request.key.shape[-1] <= MAX_HEAD_DIM
        and request.key.shape[-1] % 8 == 0
        and request.key.shape[2] > 0
        and _agrees(request.query.device.index or 0)
    )


def attend(request: Request) -> tuple[torch.Tensor, torch.Tensor]:
    """Same contract as the reference."""
    groups = request.query.shape[1] // request.key.shape[1]
    key, value = request.key, request.value
    if groups > 1:
        key = key.repeat_interleave(groups, dim=1)
        value = value.repeat_interleave(groups, dim=1)
    result = torch.ops.aten._scaled_dot_product_flash_attention(
        request.query,
        key,
        value,
        0.0,
        request.causal,
        False,
        scale=request.scale / request.temperature,
    )
    # Some kernels pad the rows of lse to a multiple of their tile.
    return result[0], result[1][:, :, : request.query.shape[2]]


@cache
def _agrees(device: int) -> bool:
    """Ask the kernel one small question on this device and compare with the reference.

    A kernel that fails or answers otherwise is left out, and the reference serves instead: a
    backend may never change what comes out.
    """
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(1, 2, n, 64, generator=generator) for n in (5, 33, 33)]
    query, key, value = (t.to(f"cuda:{device}", torch.float16) for t in tensors)
    request = Request(query, key, value, scale=0.125)
    try:
        output, lse = attend(request)
    except RuntimeError as error:
        logger.warning("The fused CUDA attention is left out on cuda:%d: %s", device, error)
        return False
    expected, expected_lse = reference.attend(request)
    right = torch.allclose(output.float(), expected.float(), atol=5e-3) and torch.allclose(
        lse, expected_lse, atol=5e-3
    )
    if not right:
        logger.warning("The fused CUDA attention differs from the reference on cuda:%d.", device)
    return right
