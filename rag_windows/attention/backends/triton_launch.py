"""Launches of the Triton kernels: keys are read once, in splits, and segments merged."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import cache

import torch

from rag_windows.attention.backends.request import Request, Segment
from rag_windows.attention.backends.triton_plan import Plan, folded_rows, make_plan
from rag_windows.attention.kernels.loading import Kernels, kernels
from rag_windows.errors import RagWindowsError

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MAX_HEAD_DIM = 256
MAX_ROWS = 512
"""Rows that share keys; with more of them, products count for more than reading."""

BLOCK_SPLITS = 16
INTERPRETED_PLACES = 64
MAX_SEGMENTS = 2


def fits(request: Request) -> bool:
    """Whether the kernel is made for this request, wherever it would run."""
    key, value = request.key, request.value
    return (
        request.query.dtype in DTYPES
        and request.query.dtype == key.dtype == value.dtype
        and not request.causal
        and key.shape[2] > 0
        and max(key.shape[-1], value.shape[-1]) <= MAX_HEAD_DIM
        and key.stride(-1) == value.stride(-1) == 1
        and 0 < folded_rows(request) <= MAX_ROWS
        and request.query.device == key.device == value.device
        and not _differentiated(request)
    )


def _differentiated(request: Request) -> bool:
    """Whether gradients are asked for, which these kernels do not give."""
    return torch.is_grad_enabled() and any(
        tensor.requires_grad for tensor in (request.query, request.key, request.value)
    )


def merges(segments: Sequence[Segment]) -> bool:
    """Whether the kernels can merge the context with these segments."""
    return 0 < len(segments) <= MAX_SEGMENTS and all(
        lse.dtype == torch.float32 for _, lse in segments
    )


def attend(request: Request, splits: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Same contract as the reference.

    Args:
        request: one that `fits`.
        splits: of the keys at most; None for what fills the device.
    """
    batch, heads, rows, _ = request.query.shape
    output = request.query.new_empty(batch, heads, rows, request.value.shape[-1])
    lse = request.query.new_empty(batch, heads, rows, dtype=torch.float32)
    _run(request, 1, rows, output, lse, splits=splits)
    return output, lse


def attend_merged(
    request: Request,
    batch: int,
    rows: int,
    segments: Sequence[Segment],
    affine: tuple[float, float],
    sink: torch.Tensor | None = None,
    splits: int | None = None,
) -> torch.Tensor:
    """Attention over the context, rescaled and merged with other segments, without a step between.

    It is what `attend`, then ``slope * lse + shift``, then `rag_windows.attention.merge` give, but
    that the context's output is not rounded on the way.

    Args:
        request: over the context, that `fits`: (1, kv heads, batch * groups * rows, head dim), the
            batch's rows and the heads of a kv head folded in this order.
        batch: batch rows.
        rows: of each and each head.
        segments: one or two others.
        affine: slope, above 0, and shift of the context's lse.
        sink: (heads,) logits of a segment without output, or None.
        splits: as for `attend`.

    Returns:
        (batch, heads, rows, value dim) in the query's dtype, dense once axes 1 and 2 are swapped.
    """
    heads = request.query.shape[1] * request.query.shape[2] // (batch * rows)
    shape = (batch, rows, heads, request.value.shape[-1])
    output = request.query.new_empty(shape).transpose(1, 2)
    _run(request, batch, rows, output, None, segments, affine, sink, splits)
    return output


def _run(
    request: Request,
    inner: int,
    rows: int,
    output: torch.Tensor,
    lse: torch.Tensor | None,
    segments: Sequence[Segment] = (),
    affine: tuple[float, float] = (1.0, 0.0),
    sink: torch.Tensor | None = None,
    splits: int | None = None,
) -> None:
    """Launch both kernels; ``inner`` batch rows are folded into the query's rows."""
    device = request.query.device
    plan = make_plan(request, _processors(device), splits)
    loaded = _loaded()
    # A row a program fills a device; the interpreter pays for programs, not for their size.
    block_places = INTERPRETED_PLACES if loaded.interpreted else 1
    # Kernels run on the current device, which need not be that of a layer's tensors.
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        part, part_lse = _partials(loaded, request, plan)
        pairs, splits, places, value_dim = part.shape
        kv_heads = request.key.shape[1]
        # A pointer that the kernel does not read has to be there all the same.
        dense = [tensor.contiguous() for segment in segments for tensor in segment]
        unread = [part_lse] * (2 * MAX_SEGMENTS - len(dense))
        loaded.combine[(pairs, -(-places // block_places))](
            part,
            part_lse,
            output,
            part_lse if lse is None else lse,
            *dense,
            *unread,
            part_lse if sink is None else sink.contiguous(),
            splits,
            kv_heads,
            inner,
            places // (inner * rows),
            rows,
            *output.stride()[:3],
            *map(float, affine),
            VALUE_DIM=value_dim,
            BLOCK_VALUE=plan.block_value,
            BLOCK_PLACES=block_places,
            BLOCK_SPLITS=BLOCK_SPLITS,
            SEGMENTS=len(segments),
            SINK=sink is not None,
        )


def _partials(loaded: Kernels, request: Request, plan: Plan) -> tuple[torch.Tensor, torch.Tensor]:
    """Output (pairs, splits, rows, value dim) and lse (pairs, splits, rows) of each split, fp32."""
    key, value = request.key, request.value
    batch, kv_heads, keys, dim = key.shape
    rows, pairs, value_dim = folded_rows(request), batch * kv_heads, value.shape[-1]
    query = request.query.reshape(pairs, rows, dim).contiguous()
    part = query.new_empty(pairs, plan.splits, rows, value_dim, dtype=torch.float32)
    part_lse = query.new_empty(pairs, plan.splits, rows, dtype=torch.float32)
    mask = _bytes(request)
    loaded.partials[(pairs * plan.row_blocks, plan.splits)](
        query,
        key,
        value,
        part_lse if mask is None else mask,
        part,
        part_lse,
        rows,
        request.query.shape[2],
        keys,
        kv_heads,
        plan.row_blocks,
        plan.chunk,
        *key.stride()[:3],
        *value.stride()[:3],
        *((0, 0, 0) if mask is None else mask.stride()),
        # An integer would be one more kernel to compile.
        float(request.scale),
        float(request.softcap or 1.0),
        float(request.temperature),
        DIM=dim,
        VALUE_DIM=value_dim,
        BLOCK_ROWS=plan.block_rows,
        BLOCK_KEYS=plan.block_keys,
        BLOCK_DIM=plan.block_dim,
        BLOCK_VALUE=plan.block_value,
        CAPPED=request.softcap is not None,
        MASKED=mask is not None,
        WIDE=loaded.interpreted,
        num_warps=plan.warps,
    )
    return part, part_lse


def _bytes(request: Request) -> torch.Tensor | None:
    """The mask as bytes (batch, rows, keys), a view of it."""
    if request.mask is None:
        return None
    mask = request.mask.unsqueeze(0) if request.mask.dim() == 2 else request.mask[:, 0]
    return mask.view(torch.uint8).expand(request.key.shape[0], -1, -1)


def _loaded() -> Kernels:
    loaded = kernels()
    if loaded is None:
        raise RagWindowsError("Triton is not installed; install rag-windows[cuda].")
    return loaded


@cache
def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
