"""The compiled kernel as a backend: when it is asked, and what is left to others."""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from rag_windows.attention import backends
from rag_windows.attention.backends import Request, cpu, native, reference
from rag_windows.attention.native.building import Kernel
from rag_windows.attention.native.calling import call
from rag_windows.attention.segments import Rows, Segment, Segments

from .native.asking import NEEDS_COMPILER, OUTPUT_TOLERANCE, draw

pytestmark = NEEDS_COMPILER


def request_of(
    rows: int = 4,
    keys: int = native.LEAST_KEYS,
    *,
    batch: int = 1,
    dim: int = 16,
    value_dim: int = 16,
    dtype: torch.dtype = torch.float32,
) -> Request:
    """8 heads, 4 of them share keys."""
    return Request(
        draw(dtype, batch, 8, rows, dim),
        draw(dtype, batch, 2, keys, dim, seed=1),
        draw(dtype, batch, 2, keys, value_dim, seed=2),
        0.25,
    )


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """The guard has not asked anything yet, and forgets what it is told here."""
    monkeypatch.setattr(native, "_agrees", native._agrees.__wrapped__)


def test_what_is_served() -> None:
    good = request_of()
    assert native.serves(good)
    assert native.serves(replace(good, softcap=2.0, temperature=0.5))
    assert native.serves(
        replace(good, query=good.query.transpose(1, 2).contiguous().transpose(1, 2))
    )
    assert not native.serves(request_of(rows=native.MOST_ROWS // 4 + 1))
    assert not native.serves(request_of(keys=native.LEAST_KEYS - 1))
    assert not native.serves(request_of(batch=2))
    assert not native.serves(request_of(dim=24))
    assert not native.serves(request_of(value_dim=24))
    assert not native.serves(request_of(dtype=torch.float64))
    assert not native.serves(replace(good, mask=torch.ones(4, native.LEAST_KEYS) > 0))
    assert not native.serves(replace(good, causal=True))
    assert not native.serves(replace(good, key=good.key.half()))
    assert not native.serves(replace(good, value=good.value.half()))
    assert not native.serves(replace(good, query=good.query.half()))
    assert not native.serves(replace(good, query=good.query.mT.contiguous().mT))
    assert not native.serves(replace(good, key=good.key.mT.contiguous().mT))
    assert not native.serves(replace(good, value=good.value.mT.contiguous().mT))


def test_no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "LEAST_KEYS", 0)
    assert native.serves(request_of(keys=1))
    assert not native.serves(request_of(keys=0))


@pytest.mark.parametrize("which", ["query", "key", "value"])
def test_gradients_are_left_to_others(which: str) -> None:
    good = request_of()
    request = replace(good, **{which: getattr(good, which).clone().requires_grad_()})
    with torch.no_grad():
        assert native.serves(request)
    assert not native.serves(request)
    backends.attend(request)[0].sum().backward()
    gradient = getattr(request, which).grad
    assert gradient is not None
    assert bool(gradient.any())


def test_rows_where_the_processor_has_products_of_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    many = request_of(rows=200)
    for made, expected in ((True, math.inf), (False, native.MOST_ROWS)):
        monkeypatch.setattr(native, "kernel", lambda *_, made=made: Kernel(lambda *_: None, made))
        assert native.most_rows(torch.float32, 16, 16) == expected
        assert native.serves(many) == made
    monkeypatch.setattr(native, "kernel", lambda *_: None)
    assert native.most_rows(torch.float32, 16, 16) == native.MOST_ROWS
    assert not native.serves(request_of())


TEXTS = (3, 300, 1, 70)


def of_texts(dtype: torch.dtype = torch.bfloat16) -> Request:
    length = sum(TEXTS)
    return replace(request_of(length, length, dtype=dtype), softcap=2.0, causal=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_texts_that_see_themselves(dtype: torch.dtype) -> None:
    whole = of_texts(dtype)
    parts = whole.query, whole.key, whole.value
    texts, first = [], 0
    for length in TEXTS:
        place = slice(first, first + length)
        own = [(whole.key[:, :, place], whole.value[:, :, place])]
        tokens = torch.arange(place.start, place.stop)
        texts.append(Segment(0, length - 1, tokens=tokens, seen="causal", layers={0: own}))
        first += length
    rows = Rows.at(torch.arange(first))
    query = whole.query[0].transpose(0, 1)
    output, lse = Segments("query", texts, first).attend(
        0, query, rows, whole.scale, whole.softcap, None
    )
    output, lse = output.transpose(0, 1).unsqueeze(0), lse.transpose(0, 1).unsqueeze(0)
    apart = zip(*(part.split(TEXTS, dim=2) for part in parts), strict=True)
    expected = [
        reference.attend(replace(whole, query=query, key=key, value=value))
        for query, key, value in apart
    ]
    for got, places in ((output, 0), (lse, 1)):
        wanted = torch.cat([one[places] for one in expected], dim=2)
        tolerance = 1e-5 if places else OUTPUT_TOLERANCE[dtype]
        torch.testing.assert_close(got, wanted, atol=tolerance, rtol=tolerance)


def test_it_is_asked_first(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Request] = []
    request, attend = request_of(), native.attend
    # So that it is compared with the reference before.
    assert native.serves(request)

    def recorded(request: Request) -> Any:
        asked.append(request)
        return attend(request)

    monkeypatch.setattr(native, "attend", recorded)
    assert native.active()
    answer = backends.attend(request)
    assert asked == [request]
    with backends.forced("cpu"):
        assert not native.active()
        expected = backends.attend(request)
    with backends.forced("native"):
        assert native.active()
        # What it does not serve is the reference's.
        backends.attend(request_of(keys=5))
    assert asked == [request]
    for part, wanted in zip(answer, expected, strict=True):
        torch.testing.assert_close(part, wanted, atol=5e-6, rtol=1e-6)


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("fault", ["output", "lse", "softcap", "many rows", "causal", "NaN"])
def test_a_kernel_that_errs_is_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    def bad(items: Any, query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        output, lse = call(items, query)
        if fault == "NaN":
            output[-1, -1, -1] = torch.nan
        capped = items.settings[1] != 0
        wrong = {
            "softcap": capped,
            "many rows": len(query) == 50,
            "causal": bool(items.table[5]),
        }.get(fault, fault == "output")
        return output + 0.01 * wrong, lse + 0.001 * (fault == "lse")

    request = request_of()
    assert native.serves(request)
    monkeypatch.setattr(native, "call", bad)
    with caplog.at_level(logging.WARNING):
        assert not native.serves(request)
    assert "differs from the reference" in caplog.text
    for answer, expected in zip(backends.attend(request), cpu.attend(request), strict=True):
        assert torch.equal(answer, expected)
