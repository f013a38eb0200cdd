"""The compiled kernel against an explicit float64 softmax, however keys and rows are cut."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rag_windows.attention.native.kernel import CHUNK, Item, Items, call

from .asking import (
    KINDS,
    LSE_TOLERANCE,
    NEEDS_COMPILER,
    OUTPUT_TOLERANCE,
    SMALL,
    Kind,
    Layout,
    before_a_wall,
    draw,
    exact,
    laid,
    reading,
    segment,
)

pytestmark = NEEDS_COMPILER
LAYOUTS: tuple[Layout, ...] = ("dense", "tokens first", "within others")


def compare(readings: list[Item], query: Tensor) -> None:
    output, lse = call(Items(readings), query)
    expected, expected_lse = exact(readings, query)
    tolerance = OUTPUT_TOLERANCE[query.dtype]
    assert output.dtype == query.dtype
    assert lse.dtype == torch.float32
    torch.testing.assert_close(output.double(), expected, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(lse.double(), expected_lse, atol=LSE_TOLERANCE, rtol=1e-6)


@dataclass(frozen=True)
class Asked:
    """Numbers of one reading."""

    lengths: list[int]
    tokens: int
    layouts: tuple[Layout, Layout]
    softcap: float | None
    temperature: float
    causal: bool


ASKED = st.builds(
    Asked,
    lengths=st.lists(st.integers(1, 700), min_size=1, max_size=4),
    tokens=st.integers(1, 24),
    layouts=st.tuples(st.sampled_from(LAYOUTS), st.sampled_from(LAYOUTS)),
    softcap=st.sampled_from([None, 2.0, 30.0]),
    temperature=st.sampled_from([1.0, 0.5, 1.3]),
    causal=st.booleans(),
)


@settings(max_examples=40)
@given(
    kind=st.sampled_from(KINDS),
    kv_heads=st.integers(1, 3),
    groups=st.integers(1, 8),
    width=st.integers(1, 4),
    asked=st.lists(ASKED, min_size=1, max_size=3),
    threads=st.sampled_from([1, 2, 5]),
    seed=st.integers(0, 2**16),
)
def test_any_readings(
    kind: Kind,
    kv_heads: int,
    groups: int,
    width: int,
    asked: list[Asked],
    threads: int,
    seed: int,
) -> None:
    """Few rows and more than a tile of them, over segments of any length, anywhere in memory."""
    torch.set_num_threads(threads)
    dtype, dim, _ = kind
    query = draw(dtype, width, kv_heads * groups, dim, seed=seed)
    readings = []
    for number, one in enumerate(asked):
        drawn = [
            segment(kind, kv_heads, length, seed + 10 * number + index)
            for index, length in enumerate(one.lengths)
        ]
        readings.append(
            reading(
                [(laid(key, one.layouts[0]), laid(value, one.layouts[1])) for key, value in drawn],
                [(seed + 3 * place) % width for place in range(one.tokens)],
                dim**-0.5,
                one.softcap,
                one.temperature,
                one.causal,
            )
        )
    compare(readings, query)


# A remainder of a block of rows, and both sides of what is served as many, and of a tile.
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 7, 15, 16, 17, 32, 33, 63, 65, 127, 128, 129, 300])
def test_rows(kind: Kind, rows: int) -> None:
    dtype, dim, _ = kind
    segments = [segment(kind, 1, 300), segment(kind, 1, 33, seed=5)]
    query = draw(dtype, rows, 1, dim)
    compare([reading(segments, range(rows), dim**-0.5, temperature=0.7)], query)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("length", [1, 2, 15, 16, 33, 65, 130, 255, 257, 520])
def test_a_text_that_sees_itself(kind: Kind, length: int) -> None:
    """In one segment, and cut; beside a text that does not see it."""
    dtype, dim, _ = kind
    query = draw(dtype, length + 7, 3, dim)
    key, value = segment(kind, 1, length)
    cut = max(1, length // 3)
    parts = [(key[:, :cut], value[:, :cut]), (key[:, cut:], value[:, cut:])]
    compare(
        [
            reading([(key, value)], range(7, 7 + length), dim**-0.5, causal=True),
            reading([segment(kind, 1, 7, seed=1)], range(7), dim**-0.5, 5.0, causal=True),
            reading(parts[: length // cut], range(length), dim**-0.5, causal=True),
        ],
        query,
    )


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("rows", [1, 20])
def test_keys(kind: Kind, rows: int) -> None:
    """Both sides of a vector, of what is laid out at once, and of a chunk."""
    dtype, dim, _ = kind
    query = draw(dtype, rows, 2, dim)
    for keys in (1, 2, 15, 16, 17, 31, 33, 63, 64, 65, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 1):
        inside = [laid(part, "within others") for part in segment(kind, 1, keys)]
        compare([reading([(inside[0], inside[1])], range(rows), dim**-0.5)], query)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("rows", [1, 20])
def test_nothing_behind_the_last_number_is_read(kind: Kind, rows: int) -> None:
    """The process would end."""
    dtype, dim, _ = kind
    query = before_a_wall(draw(dtype, rows, 1, dim))
    for keys in (1, 17, 33, 250, CHUNK, CHUNK + 1):
        key, value = map(before_a_wall, segment(kind, 1, keys))
        compare([reading([(key, value)], range(rows), dim**-0.5)], query)


@pytest.mark.parametrize("kind", SMALL, ids=str)
def test_a_query_that_is_a_view(kind: Kind) -> None:
    """As the model's: heads before tokens, in a tensor that holds more."""
    dtype, dim, _ = kind
    whole = torch.full((6, 9, 3 * dim), torch.nan, dtype=dtype)
    whole[:, 2:5, dim : 2 * dim] = draw(dtype, 6, 3, dim)
    query = whole[:, 2:5, dim : 2 * dim].transpose(0, 1)
    compare([reading([segment(kind, 2, 100)], [2, 0])], query)
