"""How a request is cut into programs of the Triton kernel."""

from __future__ import annotations

from dataclasses import dataclass

from rag_windows.attention.backends.request import Request

BLOCK_ROWS = (16, 64)
"""Fewest and most rows of a program: what a matrix product needs, and what registers hold."""

TILE_BYTES = 16 * 2**10
"""Of keys, and as much of values, that a program holds at a time."""

SHORTEST_SPLIT = 256
"""Keys below which what a split writes would cost more than it gains."""

WAVES = 2
"""Programs for each multiprocessor: while one waits for memory, the other computes."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Sizes of one launch.

    Attributes:
        block_rows: rows of a program, a power of two.
        block_keys: keys that it reads at a time, a power of two.
        block_dim: head dim, up to a power of two.
        block_value: value dim, likewise.
        row_blocks: blocks of rows.
        chunk: keys of a split, a multiple of ``block_keys``.
        splits: of the keys.
        warps: of a program.
    """

    block_rows: int
    block_keys: int
    block_dim: int
    block_value: int
    row_blocks: int
    chunk: int
    splits: int
    warps: int


def folded_rows(request: Request) -> int:
    """Rows that read the keys of one batch row and kv head."""
    _, heads, rows, _ = request.query.shape
    return heads // request.key.shape[1] * rows


def rows_of_block(request: Request) -> int:
    """Rows of a program: those of the request, up to a power of two within `BLOCK_ROWS`."""
    return min(BLOCK_ROWS[1], max(BLOCK_ROWS[0], _power(folded_rows(request))))


def make_plan(request: Request, processors: int, splits: int | None = None) -> Plan:
    """Sizes for a request; those that a kernel is compiled for depend on few of its numbers.

    Args:
        request: with at least one key.
        processors: multiprocessors of the device.
        splits: how many at most, instead of what fills the device.
    """
    rows, block_rows = folded_rows(request), rows_of_block(request)
    batch, kv_heads, keys, dim = request.key.shape
    block_dim, block_value = _power(dim), _power(request.value.shape[-1])
    widest = max(block_dim, block_value) * request.key.element_size()
    block_keys = min(128, max(16, TILE_BYTES // widest))
    row_blocks = -(-rows // block_rows)
    if splits is None:
        wanted = -(-WAVES * processors // (batch * kv_heads * row_blocks))
        splits = max(1, min(wanted, keys // SHORTEST_SPLIT))
    blocks = -(-keys // block_keys)
    chunk = -(-blocks // splits) * block_keys
    return Plan(
        block_rows=block_rows,
        block_keys=block_keys,
        block_dim=block_dim,
        block_value=block_value,
        row_blocks=row_blocks,
        chunk=chunk,
        splits=-(-keys // chunk),
        warps=8 if block_rows * max(block_dim, block_value) > 8192 else 4,
    )


def _power(number: int) -> int:
    """The smallest power of two that is no smaller, 16 at least: products take no less."""
    return max(16, 1 << (number - 1).bit_length())
