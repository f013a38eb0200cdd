"""What the compiled kernel would read out of bounds is refused before it is asked."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rag_windows import RagWindowsError
from rag_windows.attention.native import kernel as items
from rag_windows.attention.native.kernel import MAX_DIM, Items, call, sizes_fit

from .asking import NEEDS_COMPILER, draw, reading

Segment = tuple[Tensor, Tensor]


def numbers(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return draw(dtype, *size)


def pair(keys: int = 20, heads: int = 2, dim: int = 16, value_dim: int = 16) -> Segment:
    return numbers(heads, keys, dim), numbers(heads, keys, value_dim)


GOOD = pair()
BAD: dict[str, list[Segment]] = {
    "no segment": [],
    "no key": [pair(0)],
    "no key behind some": [GOOD, pair(0)],
    "other kv heads": [GOOD, pair(heads=3)],
    "fewer kv heads of values": [(GOOD[0], GOOD[1][:1])],
    "other head dim": [GOOD, pair(dim=32)],
    "other value dim": [GOOD, pair(value_dim=32)],
    "fewer values": [(GOOD[0], GOOD[1][:, :-1])],
    "more values": [(GOOD[0][:, :-1], GOOD[1])],
    "head dim of no vectors": [pair(dim=24)],
    "value dim of no vectors": [pair(value_dim=8)],
    "head dim of nothing": [pair(dim=0)],
    "too large a head dim": [pair(dim=MAX_DIM + 16)],
    "too large a value dim": [pair(value_dim=MAX_DIM + 16)],
    "keys of another dtype": [(GOOD[0].half(), GOOD[1])],
    "values of another dtype": [(GOOD[0], GOOD[1].bfloat16())],
    "a later dtype": [GOOD, (GOOD[0].half(), GOOD[1].half())],
    "doubles": [(GOOD[0].double(), GOOD[1].double())],
    "keys across": [(numbers(2, 16, 20).mT, GOOD[1])],
    "values across": [GOOD, (GOOD[0], numbers(2, 16, 20).mT)],
    "elsewhere": [(GOOD[0].to("meta"), GOOD[1].to("meta"))],
}


@pytest.mark.parametrize("what", BAD)
def test_segments_that_do_not_fit(what: str) -> None:
    Items([reading([GOOD])])
    with pytest.raises(RagWindowsError, match="CPU kernel"):
        Items([reading(BAD[what])])


def test_readings_that_do_not_fit() -> None:
    with pytest.raises(RagWindowsError, match="an item"):
        Items([])
    for tokens in ([], [-1], [0, -1]):
        with pytest.raises(RagWindowsError, match="needs tokens"):
            Items([reading([GOOD]), reading([GOOD], tokens)])
    with pytest.raises(RagWindowsError, match="of one dtype and one size"):
        Items([reading([GOOD]), reading([pair(dim=32)])])
    with pytest.raises(RagWindowsError, match="keys in"):
        Items([reading([GOOD]), reading([])])


def test_keys_that_are_too_far_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel counts the bytes between a few of them in 32 bits."""
    assert 15 * items.MAX_STEP * 2 < 2**31
    monkeypatch.setattr(items, "MAX_STEP", 200)
    Items([reading([(numbers(2, 20, 200)[..., :16], GOOD[1])])])
    with pytest.raises(RagWindowsError, match="near each other"):
        Items([reading([(numbers(2, 20, 201)[..., :16], GOOD[1])])])


QUERIES: dict[str, Tensor] = {
    "other dtype": numbers(3, 4, 16, dtype=torch.bfloat16),
    "larger head dim": numbers(3, 4, 32),
    "smaller head dim": numbers(3, 4, 16)[..., :8],
    "too few tokens": numbers(2, 4, 16),
    "heads in no groups": numbers(3, 5, 16),
    "fewer heads than the keys": numbers(3, 1, 16),
    "no heads": numbers(3, 0, 16),
    "across": numbers(3, 16, 4).mT,
    "elsewhere": numbers(3, 4, 16).to("meta"),
}


@pytest.mark.parametrize("what", QUERIES)
def test_a_query_that_does_not_fit(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Items([reading([GOOD]), reading([GOOD], [0, 2])])
    assert made.fit(numbers(3, 4, 16))
    monkeypatch.setattr(items, "kernel", lambda *_: pytest.fail("the kernel was asked"))
    with pytest.raises(RagWindowsError, match="takes a query"):
        call(made, QUERIES[what])


def test_without_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(items, "kernel", lambda *_: None)
    with pytest.raises(RagWindowsError, match="There is no CPU kernel"):
        call(Items([reading([GOOD])]), numbers(1, 4, 16))


def test_sizes() -> None:
    assert sizes_fit(16, 128)
    assert sizes_fit(MAX_DIM, MAX_DIM)
    for size in (-16, 0, 8, 24, MAX_DIM + 16):
        assert not sizes_fit(size, 16)
        assert not sizes_fit(16, size)


@NEEDS_COMPILER
def test_the_last_token_is_read() -> None:
    """The bound is not one too low."""
    query = numbers(3, 4, 16)
    output, _ = call(Items([reading([GOOD], [2])]), query)
    expected, _ = call(Items([reading([GOOD])]), query[2:])
    assert torch.equal(output, expected)
