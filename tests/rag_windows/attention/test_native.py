"""When the compiled kernel answers for a segment, and when it is left to others."""

from __future__ import annotations

import logging
import math

import pytest
import torch
from torch import Tensor

from rag_windows.attention import backends
from rag_windows.attention.backends import Request, cpu, reference
from rag_windows.attention.native import kernel as native
from rag_windows.attention.native.building import Kernel
from rag_windows.attention.native.kernel import call
from rag_windows.attention.segments import Queries, Rows, Segment, Segments

from .native.asking import NEEDS_COMPILER, OUTPUT_TOLERANCE, draw

pytestmark = NEEDS_COMPILER

TEXTS = (3, 300, 1, 70)


def parts(
    keys: int = native.LEAST_KEYS,
    *,
    dim: int = 16,
    value_dim: int = 16,
    dtype: torch.dtype = torch.float32,
) -> list[tuple[Tensor, Tensor]]:
    """Keys and values of a segment, of two kv heads."""
    return [(draw(dtype, 1, 2, keys, dim), draw(dtype, 1, 2, keys, value_dim, seed=1))]


def asked(tokens: int = 4, dtype: torch.dtype = torch.float32) -> Tensor:
    """A query of 8 heads."""
    return draw(dtype, tokens, 8, 16, seed=2)


def takes(query: Tensor, given: list[tuple[Tensor, Tensor]], *, causal: bool = False) -> bool:
    return native.takes(query, given, len(query) * 4, causal=causal)


def attend(query: Tensor, given: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    whole = Segments("context", [Segment(0, 0, layers={0: given})], len(query))
    return whole.attend(
        Queries(0, query, Rows.at(torch.zeros(len(query)).long()), 0.25, None, None)
    )


def test_what_it_takes() -> None:
    (good,) = parts()
    key, value = good
    assert takes(asked(), [good])
    assert takes(asked(), [good, good])
    assert not takes(asked(native.MOST_ROWS // 4 + 1), [good])
    assert not takes(asked(), parts(dim=24))
    assert not takes(asked(), parts(value_dim=24))
    assert not takes(asked(dtype=torch.float64), parts(dtype=torch.float64))
    assert not takes(asked(), [(key.half(), value)])
    assert not takes(asked(), [(key, value.half())])
    assert not takes(asked().half(), [good])
    assert not takes(asked().mT.contiguous().mT, [good])
    assert not takes(asked(), [(key.mT.contiguous().mT, value)])
    assert not takes(asked(), [(key, value.mT.contiguous().mT)])


def test_rows_where_the_processor_has_products_of_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    for made, expected in ((True, math.inf), (False, native.MOST_ROWS)):
        monkeypatch.setattr(native, "kernel", lambda *_, made=made: Kernel(lambda *_: None, made))
        assert native.most_rows(torch.float32, 16, 16) == expected
        assert takes(asked(200), parts()) == made
        assert takes(asked(2), parts(), causal=True) == made
    monkeypatch.setattr(native, "kernel", lambda *_: None)
    assert not takes(asked(), parts())


def test_what_a_call_is_worth() -> None:
    def reading(keys: int, tokens: int = 1, causal: bool = False) -> native.Item:
        key, value = parts(keys)[0]
        return native.Item([(key[0], value[0])], range(tokens), 1.0, None, 1.0, causal)

    assert not native.pays([])
    assert native.pays([reading(native.LEAST_KEYS)])
    assert not native.pays([reading(native.LEAST_KEYS - 1)])
    assert native.pays([reading(3), reading(4)])
    few = native.LEAST_TOKENS // 2
    assert native.pays([reading(few, few, causal=True), reading(few, few, causal=True)])
    assert not native.pays([reading(few - 1, few - 1, causal=True), reading(few, few, causal=True)])


@pytest.mark.parametrize("which", [0, 1, 2])
def test_gradients_are_left_to_others(which: int) -> None:
    tensors = [asked(), *parts()[0]]
    tensors[which].requires_grad_()
    query, key, value = tensors
    with torch.no_grad():
        assert takes(query, [(key, value)])
    assert not takes(query, [(key, value)])
    attend(query, [(key, value)])[0].sum().backward()
    gradient = tensors[which].grad
    assert gradient is not None
    assert bool(gradient.any())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_texts_that_see_themselves(dtype: torch.dtype) -> None:
    """One call for all of them, where the processor is made for it."""
    length = sum(TEXTS)
    (key, value), query = parts(length, dtype=dtype)[0], asked(length, dtype)
    texts, expected, first = [], [], 0
    for size in TEXTS:
        place = slice(first, first + size)
        own = key[:, :, place], value[:, :, place]
        tokens = torch.arange(place.start, place.stop)
        texts.append(Segment(0, size - 1, tokens=tokens, seen="causal", layers={0: [own]}))
        request = Request(query[None, place].transpose(1, 2), *own, 0.25, softcap=2.0, causal=True)
        expected.append(reference.attend(request))
        first += size
    rows = Rows.at(torch.arange(length))
    output, lse = Segments("query", texts, length).attend(Queries(0, query, rows, 0.25, 2.0, None))
    wanted = torch.cat([one[0][0].transpose(0, 1) for one in expected])
    wanted_lse = torch.cat([one[1][0].transpose(0, 1) for one in expected])
    tolerance = OUTPUT_TOLERANCE[dtype]
    torch.testing.assert_close(output, wanted, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(lse, wanted_lse, atol=1e-5, rtol=1e-5)


def test_it_is_asked_first(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def recorded(items: native.Items, query: Tensor) -> tuple[Tensor, Tensor]:
        calls.append(len(query))
        return call(items, query)

    assert native.available(torch.float32, 16, 16)  # it is compared with the reference before
    monkeypatch.setattr(native, "call", recorded)
    answer = attend(asked(), parts())
    assert calls == [4]
    with backends.forced("cpu"):
        expected = attend(asked(), parts())
    with backends.forced("native"):
        attend(asked(), parts(5))  # what it does not take is the reference's
    assert calls == [4]
    for part, wanted in zip(answer, expected, strict=True):
        torch.testing.assert_close(part, wanted, atol=5e-6, rtol=1e-6)


@pytest.mark.parametrize("fault", ["output", "lse", "softcap", "many rows", "causal", "NaN"])
def test_a_kernel_that_errs_is_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    def bad(items: native.Items, query: Tensor) -> tuple[Tensor, Tensor]:
        output, lse = call(items, query)
        if fault == "NaN":
            output[-1, -1, -1] = torch.nan
        wrong = {
            "softcap": items.settings[1] != 0,
            "many rows": len(query) == 50,
            "causal": bool(items.table[5]),
        }.get(fault, fault == "output")
        return output + 0.01 * wrong, lse + 0.001 * (fault == "lse")

    monkeypatch.setattr(native, "_agrees", native._agrees.__wrapped__)
    assert takes(asked(), parts())
    monkeypatch.setattr(native, "call", bad)
    with caplog.at_level(logging.WARNING):
        assert not takes(asked(), parts())
    assert "differs from the reference" in caplog.text
    (given,) = parts()
    expected = cpu.attend(Request(asked()[None].transpose(1, 2), *given, 0.25))
    for answer, wanted in zip(attend(asked(), [given]), expected, strict=True):
        assert torch.equal(answer, wanted[0].transpose(0, 1))
