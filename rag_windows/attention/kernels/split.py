"""The Triton kernel that reads a segment's keys and values once, in splits."""

from __future__ import annotations

import triton
import triton.language as tl


# The number of keys, rows and splits changes from request to request, and a kernel specialised on
# their divisors would be compiled anew in the middle of an answer.
@triton.jit(
    do_not_specialize=["rows", "mask_rows", "keys", "row_blocks", "chunk", "mask_batch", "mask_row"]
)
def partials(
    query: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    mask: tl.tensor,
    output: tl.tensor,
    lse: tl.tensor,
    rows: tl.tensor,
    mask_rows: tl.tensor,
    keys: tl.tensor,
    kv_heads: tl.tensor,
    row_blocks: tl.tensor,
    chunk: tl.tensor,
    key_batch: tl.tensor,
    key_head: tl.tensor,
    key_token: tl.tensor,
    value_batch: tl.tensor,
    value_head: tl.tensor,
    value_token: tl.tensor,
    mask_batch: tl.tensor,
    mask_row: tl.tensor,
    mask_token: tl.tensor,
    scale: tl.tensor,
    softcap: tl.tensor,
    temperature: tl.tensor,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    CAPPED: tl.constexpr,
    MASKED: tl.constexpr,
    WIDE: tl.constexpr,
) -> None:
    """Attention of a block of rows over one split of the keys, with its log-sum-exp.

    The grid is (pairs * row blocks, splits), a pair being a batch row and a kv head. Blocks of one
    pair stand side by side in the grid, so that they find its keys in the second-level cache.

    Args:
        query: (pairs, rows, DIM), contiguous: all rows that read one pair's keys.
        key: (batch, kv heads, keys, DIM), the last axis dense; its strides follow.
        value: (batch, kv heads, keys, VALUE_DIM), likewise.
        mask: (batch, mask rows, keys) bytes, where MASKED; row r of a pair reads its mask's row
            ``r % mask_rows``.
        output: (pairs, splits, rows, VALUE_DIM) fp32, normalised within the split.
        lse: (pairs, splits, rows) fp32; ``-inf`` where a row sees no key of the split.
        rows: of a pair.
        mask_rows: of a batch row's mask.
        keys: of the segment.
        kv_heads: of the keys.
        row_blocks: blocks of BLOCK_ROWS rows.
        chunk: keys of a split, a multiple of BLOCK_KEYS.
        key_batch: stride of the keys, as are the next two.
        key_head: as above.
        key_token: as above.
        value_batch: stride of the values, as are the next two.
        value_head: as above.
        value_token: as above.
        mask_batch: stride of the mask, as are the next two.
        mask_row: as above.
        mask_token: as above.
        scale: multiplies the logits.
        softcap: caps them where CAPPED.
        temperature: divides them, after the cap.
        DIM: head dim.
        VALUE_DIM: of the values.
        BLOCK_ROWS: rows of a program.
        BLOCK_KEYS: keys that it reads at a time.
        BLOCK_DIM: DIM, up to a power of two.
        BLOCK_VALUE: VALUE_DIM, likewise.
        CAPPED: whether there is a soft cap.
        MASKED: whether there is a mask.
        WIDE: whether products take fp32 operands, which Triton's interpreter needs for bf16.
    """
    place = tl.program_id(0)
    split = tl.program_id(1)
    splits = tl.num_programs(1)
    block = place % row_blocks
    pair = (place // row_blocks).to(tl.int64)
    batch = pair // kv_heads
    head = pair % kv_heads

    row = block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    dim = tl.arange(0, BLOCK_DIM)
    value_dim = tl.arange(0, BLOCK_VALUE)
    real_row = row < rows
    real_dim = dim < DIM
    real_value = value_dim < VALUE_DIM
    own = tl.load(
        query + (pair * rows + row)[:, None] * DIM + dim[None, :],
        mask=real_row[:, None] & real_dim[None, :],
        other=0.0,
    )
    if WIDE:
        own = own.to(tl.float32)
    keys_here = key + batch * key_batch + head * key_head
    values_here = value + batch * value_batch + head * value_head
    mask_here = mask + batch * mask_batch + (row % mask_rows).to(tl.int64)[:, None] * mask_row

    peak = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
    total = tl.full([BLOCK_ROWS], 0.0, tl.float32)
    mixed = tl.full([BLOCK_ROWS, BLOCK_VALUE], 0.0, tl.float32)
    first = split * chunk
    last = tl.minimum(first + chunk, keys)
    for start in range(first, last, BLOCK_KEYS):
        token = start + tl.arange(0, BLOCK_KEYS)
        real = token < last
        far = token.to(tl.int64)
        tile = tl.load(
            keys_here + far[None, :] * key_token + dim[:, None],
            mask=real[None, :] & real_dim[:, None],
            other=0.0,
        )
        if WIDE:
            tile = tile.to(tl.float32)
        scores = tl.dot(own, tile, input_precision="ieee") * scale
        if CAPPED:
            # tanh without a library: exp of what is never above zero can't overflow.
            ratio = scores / softcap
            small = tl.exp(-2.0 * tl.abs(ratio))
            scores = tl.where(ratio < 0.0, -softcap, softcap) * (1.0 - small) / (1.0 + small)
        scores = scores / temperature
        seen = real[None, :]
        if MASKED:
            seen = seen & real_row[:, None]
            seen = tl.load(mask_here + far[None, :] * mask_token, mask=seen, other=0) != 0
        scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, 1))
        # A row that has seen nothing yet has no peak to subtract.
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp(scores - base[:, None])
        shrink = tl.exp(peak - base)
        total = total * shrink + tl.sum(weights, 1)
        tile = tl.load(
            values_here + far[:, None] * value_token + value_dim[None, :],
            mask=real[:, None] & real_value[None, :],
            other=0.0,
        )
        # Rounded as fused kernels round them, also where the product itself is wide.
        weights = weights.to(tile.dtype)
        if WIDE:
            weights = weights.to(tl.float32)
            tile = tile.to(tl.float32)
        mixed = mixed * shrink[:, None] + tl.dot(weights, tile, input_precision="ieee")
        peak = higher

    some = total > 0.0
    divisor = tl.where(some, total, 1.0)
    at = (pair * splits + split) * rows + row
    tl.store(
        output + at[:, None] * VALUE_DIM + value_dim[None, :],
        mixed / divisor[:, None],
        mask=real_row[:, None] & real_value[None, :],
    )
    tl.store(lse + at, tl.where(some, peak + tl.log(divisor), float("-inf")), mask=real_row)
