"""The Triton kernel that adds up splits and, in the same pass, merges segments."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["splits", "inner", "rows"])
def combine(
    part: tl.tensor,
    part_lse: tl.tensor,
    output: tl.tensor,
    lse: tl.tensor,
    first: tl.tensor,
    first_lse: tl.tensor,
    second: tl.tensor,
    second_lse: tl.tensor,
    sink: tl.tensor,
    splits: tl.tensor,
    kv_heads: tl.tensor,
    inner: tl.tensor,
    groups: tl.tensor,
    rows: tl.tensor,
    output_batch: tl.tensor,
    output_head: tl.tensor,
    output_row: tl.tensor,
    slope: tl.tensor,
    shift: tl.tensor,
    VALUE_DIM: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    BLOCK_PLACES: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    SEGMENTS: tl.constexpr,
    SINK: tl.constexpr,
) -> None:
    """Some rows: splits make the context, and the context stands beside the other segments.

    The grid is (pairs, blocks of a pair's rows). A pair is a batch row of the keys and a kv head;
    its rows are ``inner`` batch rows of ``groups`` heads of ``rows`` rows. With no other segment
    the context's output and lse are written as they are; otherwise its lse enters the merge as
    ``slope * lse + shift``, and no lse is written.

    Args:
        part: (pairs, splits, rows of a pair, VALUE_DIM) fp32.
        part_lse: (pairs, splits, rows of a pair) fp32.
        output: (batch, heads, rows, VALUE_DIM), the last axis dense; its strides follow.
        lse: (batch, heads, rows) fp32, contiguous, where SEGMENTS is 0.
        first: (batch, heads, rows, VALUE_DIM), contiguous: a segment's output.
        first_lse: (batch, heads, rows) fp32, contiguous: its lse.
        second: as above, where SEGMENTS is 2.
        second_lse: as above.
        sink: (heads,) logits of a segment without output, where SINK.
        splits: number of splits.
        kv_heads: of the keys.
        inner: batch rows that read one pair's keys.
        groups: query heads of a kv head.
        rows: of a batch row and head.
        output_batch: stride of the output, as are the next two.
        output_head: as above.
        output_row: as above.
        slope: of the context's lse.
        shift: of the context's lse.
        VALUE_DIM: of the values.
        BLOCK_VALUE: VALUE_DIM, up to a power of two.
        BLOCK_PLACES: rows of a program.
        BLOCK_SPLITS: splits that are read at a time.
        SEGMENTS: other segments, 0 to 2.
        SINK: whether there is a sink; only beside other segments.
    """
    pair = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK_PLACES + tl.arange(0, BLOCK_PLACES)
    per_batch = rows * groups
    places = inner * per_batch
    taken = place < places
    batch = pair // kv_heads * inner + place // per_batch
    head = pair % kv_heads * groups + place // rows % groups
    row = place % rows
    at = (batch * kv_heads * groups + head) * rows + row
    dim = tl.arange(0, BLOCK_VALUE)
    real = taken[:, None] & (dim < VALUE_DIM)[None, :]

    peak = tl.full([BLOCK_PLACES], float("-inf"), tl.float32)
    total = tl.full([BLOCK_PLACES], 0.0, tl.float32)
    mixed = tl.full([BLOCK_PLACES, BLOCK_VALUE], 0.0, tl.float32)
    for start in range(0, splits, BLOCK_SPLITS):
        split = start + tl.arange(0, BLOCK_SPLITS)
        source = (pair * splits + split)[None, :] * places + place[:, None]
        there = taken[:, None] & (split < splits)[None, :]
        lses = tl.load(part_lse + source, mask=there, other=float("-inf"))
        higher = tl.maximum(peak, tl.max(lses, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp(lses - base[:, None])
        shrink = tl.exp(peak - base)
        tile = tl.load(
            part + source[:, :, None] * VALUE_DIM + dim[None, None, :],
            mask=there[:, :, None] & (dim < VALUE_DIM)[None, None, :],
            other=0.0,
        )
        mixed = mixed * shrink[:, None] + tl.sum(weights[:, :, None] * tile, 1)
        total = total * shrink + tl.sum(weights, 1)
        peak = higher
    some = total > 0.0
    divisor = tl.where(some, total, 1.0)
    mixed = mixed / divisor[:, None]
    own = tl.where(some, peak + tl.log(divisor), float("-inf"))

    if SEGMENTS == 0:
        tl.store(lse + at, own, mask=taken)
    else:
        own = tl.where(some, slope * own + shift, float("-inf"))
        here = at[:, None] * VALUE_DIM + dim[None, :]
        lse_1 = tl.load(first_lse + at, mask=taken, other=float("-inf"))
        higher = tl.maximum(own, lse_1)
        if SEGMENTS == 2:
            lse_2 = tl.load(second_lse + at, mask=taken, other=float("-inf"))
            higher = tl.maximum(higher, lse_2)
        if SINK:
            sunk = tl.load(sink + head, mask=taken, other=0.0).to(tl.float32)
            higher = tl.maximum(higher, sunk)
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weight = tl.exp(own - base)
        mixed = mixed * weight[:, None]
        weight_1 = tl.exp(lse_1 - base)
        tile_1 = tl.load(first + here, mask=real, other=0.0).to(tl.float32)
        mixed += weight_1[:, None] * tile_1
        weight += weight_1
        if SEGMENTS == 2:
            weight_2 = tl.exp(lse_2 - base)
            tile_2 = tl.load(second + here, mask=real, other=0.0).to(tl.float32)
            mixed += weight_2[:, None] * tile_2
            weight += weight_2
        if SINK:
            weight += tl.exp(sunk - base)
        # Segments that are all empty for this row give zero, never NaN.
        mixed = mixed / tl.where(weight > 0.0, weight, 1.0)[:, None]
    target = output + batch * output_batch + head * output_head + row * output_row
    tl.store(
        target[:, None] + dim[None, :],
        mixed.to(output.dtype.element_ty),
        mask=real,
    )
