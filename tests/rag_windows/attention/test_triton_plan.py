"""How requests are cut into programs."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from rag_windows.attention.backends.request import Request
from rag_windows.attention.backends.triton_plan import (
    BLOCK_ROWS,
    SHORTEST_SPLIT,
    Plan,
    make_plan,
)


def plan(
    rows: int, keys: int, dim: int = 128, kv_heads: int = 8, processors: int = 132, **options: int
) -> Plan:
    def empty(n: int) -> torch.Tensor:
        return torch.empty(1, kv_heads, n, dim, dtype=torch.bfloat16, device="meta")

    return make_plan(Request(empty(rows), empty(keys), empty(keys), 1.0), processors, **options)


@given(
    rows=st.integers(1, 512),
    keys=st.integers(1, 1_000_000),
    dim=st.integers(1, 256),
    kv_heads=st.integers(1, 64),
    processors=st.integers(1, 200),
)
def test_splits_cover_all_keys_and_none_is_empty(
    rows: int, keys: int, dim: int, kv_heads: int, processors: int
) -> None:
    made = plan(rows, keys, dim, kv_heads, processors)
    assert (made.splits - 1) * made.chunk < keys <= made.splits * made.chunk
    assert made.chunk % made.block_keys == 0
    assert made.splits == 1 or made.chunk >= SHORTEST_SPLIT
    assert made.row_blocks * made.block_rows >= rows > (made.row_blocks - 1) * made.block_rows
    for size in (made.block_rows, made.block_keys, made.block_dim, made.block_value):
        assert size >= 16
        assert size & (size - 1) == 0
    assert made.block_dim >= dim


def test_what_is_compiled_depends_on_few_numbers() -> None:
    """Answers grow, and requests differ: none of it may compile a kernel anew."""

    def sizes(made: Plan) -> tuple[int, ...]:
        return made.block_rows, made.block_keys, made.block_dim, made.block_value, made.warps

    made = {sizes(plan(rows, keys)) for rows in range(1, 200) for keys in (1, 777, 8192, 131072)}
    assert len(made) == 3
    assert {rows for rows, *_ in made} == {BLOCK_ROWS[0], 32, BLOCK_ROWS[1]}


def test_a_long_context_fills_the_device() -> None:
    made = plan(4, 131072)
    assert 2 * 132 <= made.splits * 8 < 3 * 132
    assert plan(4, 100).splits == 1
    assert plan(4, 100, splits=3).splits == 2
