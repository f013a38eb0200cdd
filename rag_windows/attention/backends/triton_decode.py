"""A few rows over many keys, in Triton, where its kernels agree with the reference."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import torch

from rag_windows.attention.backends import reference
from rag_windows.attention.backends.request import Request, Segment
from rag_windows.attention.backends.triton_launch import attend, attend_merged, fits
from rag_windows.attention.backends.triton_launch import merges as can_merge
from rag_windows.attention.backends.triton_plan import rows_of_block
from rag_windows.attention.kernels.loading import kernels
from rag_windows.attention.merge import merge, merge_weights

__all__ = ["attend", "attend_merged", "merges", "serves"]

logger = logging.getLogger(__name__)

TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Of outputs, most of which are below 1: rounding to the dtype, and the order of sums."""

LSE_TOLERANCE = 1e-3
"""An lse is fp32 whatever the dtype; one that were rounded to bf16 would shift the merge."""


def serves(request: Request) -> bool:
    """Whether the kernels compute this request, and do so rightly on this device."""
    loaded = kernels()
    if loaded is None or not fits(request):
        return False
    device = request.query.device
    if device.type != "cuda" and not loaded.interpreted:
        return False
    return _agrees(
        device,
        request.query.dtype,
        request.key.shape[-1],
        request.value.shape[-1],
        rows_of_block(request),
        request.softcap is not None,
        request.mask is not None,
    )


def merges(request: Request, segments: Sequence[Segment]) -> bool:
    """Whether they also merge the answer with these segments."""
    return can_merge(segments) and serves(request)


@cache
def _agrees(
    device: torch.device,
    dtype: torch.dtype,
    dim: int,
    value_dim: int,
    block_rows: int,
    capped: bool,
    masked: bool,
) -> bool:
    """Ask the kernels one small question on this device and compare with the reference.

    Each set of sizes and features is a kernel of its own: one may be right where another needs
    more memory than the device has, so each is asked once. One that fails or answers otherwise is
    left out: a backend may never change what comes out.
    """
    loaded = kernels()
    if loaded is None:
        return False
    rows, keys, heads = block_rows // 2, 300, 2
    generator = torch.Generator().manual_seed(0)

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator).to(dtype)

    mask = torch.rand(2 * rows, keys, generator=generator) < 0.5
    mask[0] = False
    request = Request(
        draw(1, heads, 2 * rows, dim),
        draw(1, heads, keys, dim),
        draw(1, heads, keys, value_dim),
        dim**-0.5,
        temperature=0.7,
        softcap=3.0 if capped else None,
        mask=mask if masked else None,
    )
    other = 0.25 * draw(2, heads, rows, value_dim), draw(2, heads, rows).float()
    sink = draw(heads)
    # On the CPU, where no setting of the process makes fp32 products less exact.
    output, lse = reference.attend(request)
    unfolded = [_unfold(tensor, heads, rows) for tensor in (output, lse)]
    weights = merge_weights([other[1], 0.8 * unfolded[1] + 0.1], sink.float().view(1, -1, 1))
    expected = merge([other[0], unfolded[0]], weights)
    there = _moved(request, device)
    segment = other[0].to(device), other[1].to(device)
    try:
        answers = [*attend(there, splits=3)]
        answers.append(
            attend_merged(there, 2, rows, [segment], (0.8, 0.1), sink.to(device), splits=3)
        )
        answers = [answer.float().cpu() for answer in answers]
    except loaded.errors as error:
        logger.warning("The Triton kernels for %s are left out on %s: %s", dtype, device, error)
        return False
    tolerance = TOLERANCE[dtype]
    right = all(
        torch.allclose(answer, wanted.float(), atol=allowed, rtol=1e-5)
        for answer, wanted, allowed in zip(
            answers, (output, lse, expected), (tolerance, LSE_TOLERANCE, tolerance), strict=True
        )
    )
    if not right:
        logger.warning("The Triton kernels for %s differ from the reference on %s.", dtype, device)
    return right


def _moved(request: Request, device: torch.device) -> Request:
    tensors = {name: getattr(request, name).to(device) for name in ("query", "key", "value")}
    mask = None if request.mask is None else request.mask.to(device)
    return replace(request, **tensors, mask=mask)


def _unfold(folded: torch.Tensor, heads: int, rows: int) -> torch.Tensor:
    """(1, heads, batch * rows, ...) to (batch, heads, rows, ...)."""
    return folded.squeeze(0).unflatten(1, (-1, rows)).transpose(0, 1)
