"""Every attention backend against the reference in float64, and what no kernel may be asked."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from rag_windows.attention import backends
from rag_windows.attention.backends import AttentionRequest, Backend

from . import asked, stand_in
from .asked import exact

NAMES = [
    "reference",
    "cpu",
    pytest.param("reference on cuda", marks=pytest.mark.gpu),
]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Output: rounding to the dtype. The lse is float32 whatever the inputs, but fused kernels use a
# short exp for half inputs; lse rounded to bf16 would be off by 1e-2 and more.
OUTPUT_TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}
LSE_TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-4, torch.float16: 3e-4}
# (batch, heads, kv heads, rows, keys, head dim)
SHAPES = {
    "one row": (1, 4, 4, 1, 9, 16),
    "one row of grouped heads": (2, 8, 2, 1, 300, 16),
    "grouped heads": (1, 6, 2, 5, 37, 16),
    "one kv head": (1, 8, 1, 3, 130, 8),
    "batch": (3, 4, 2, 2, 21, 32),
    "one key": (1, 2, 2, 4, 1, 16),
    "long": (1, 2, 1, 70, 1500, 16),
    "a few rows of grouped heads, long": (1, 8, 2, 4, 1100, 16),
    "odd head dim": (1, 2, 2, 3, 20, 20),
}


def backend(name: str) -> tuple[Backend, str]:
    """A backend and its device."""
    kind, _, on = name.partition(" on ")
    return backends.BACKENDS[kind], on or "cpu"


def tensors(
    shape: tuple[int, ...], dtype: torch.dtype, device: str
) -> tuple[Tensor, Tensor, Tensor]:
    batch, heads, kv_heads, rows, keys, dim = shape
    generator = torch.Generator().manual_seed(sum(shape))

    def draw(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator).to(device, dtype)

    return (
        draw(batch, heads, rows, dim) * 2,
        draw(batch, kv_heads, keys, dim),
        draw(batch, kv_heads, keys, dim),
    )


Asked = tuple[AttentionRequest, Tensor]
"""A request of one part, and the query."""


def asking(query: Tensor, key: Tensor, value: Tensor, scale: float, **numbers: Any) -> Asked:
    """A request of all rows of a query (batch, heads, rows, head dim), and the query as it is."""
    tokens = query.transpose(1, 2).flatten(0, 1)
    return AttentionRequest([(key, value)], scale, **numbers), tokens


def check(name: str, request: AttentionRequest, query: Tensor) -> None:
    """The backend agrees, or leaves the request to the reference for a reason that we know of."""
    one, _ = backend(name)
    if not one.serves(request, query):
        assert request.softcap is not None
        return
    output, lse, parts = one.prepare([request], query)(query, per_part=True)
    expected, expected_lse, _ = exact([request], query)
    dtype = query.dtype
    tolerance, lse_tolerance = OUTPUT_TOLERANCE[dtype], LSE_TOLERANCE[dtype]
    assert parts == [None]
    assert output.dtype == dtype
    assert output.shape == expected.shape
    assert lse.dtype == torch.float32
    assert lse.shape == expected_lse.shape
    torch.testing.assert_close(output.double(), expected, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(lse.double(), expected_lse, atol=lse_tolerance, rtol=2e-6)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("temperature", [1.0, 0.4])
def test_all_keys(name: str, dtype: torch.dtype, shape: str, temperature: float) -> None:
    _, device = backend(name)
    query, key, value = tensors(SHAPES[shape], dtype, device)
    check(name, *asking(query, key, value, 0.3, temperature=temperature))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("rows", [2, 70, 600])
def test_causal(name: str, dtype: torch.dtype, softcap: float | None, rows: int) -> None:
    _, device = backend(name)
    query, key, value = tensors((1, 4, 2, rows, rows, 16), dtype, device)
    check(name, *asking(query, key, value, 0.3, softcap=softcap, causal=True))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("keys", [11, 1500])
def test_masked(name: str, dtype: torch.dtype, softcap: float | None, keys: int) -> None:
    """Rows that see all, some, the last few, one, and no key at all."""
    _, device = backend(name)
    query, key, value = tensors((2, 4, 2, 5, keys, 16), dtype, device)
    mask = torch.rand(5, keys, generator=torch.Generator().manual_seed(1)) < 0.5
    mask[0] = True
    mask[2] = torch.arange(keys) >= keys - 3
    mask[3] = torch.arange(keys) == keys // 2
    mask[4] = False
    mask = mask.expand(2, 1, -1, -1).to(device)
    check(name, *asking(query, key, value, 0.3, temperature=0.7, softcap=softcap, mask=mask))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [40.0, 3000.0])
def test_large_logits_stay_finite(name: str, size: float) -> None:
    _, device = backend(name)
    query, key, value = tensors((1, 4, 2, 5, 40, 16), torch.float32, device)
    request, query = asking(query, key, value, size, temperature=0.5)
    one, _ = backend(name)
    assert one.serves(request, query)
    output, lse, _ = one.prepare([request], query)(query)
    expected, expected_lse, _ = exact([request], query)
    assert bool(torch.isfinite(output).all())
    assert bool(torch.isfinite(lse).all())
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=1e-2)
    if size < 100:
        # Rounding of logits this large shifts the softmax between near ties.
        torch.testing.assert_close(output.double(), expected, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("keys", [0, 4])
def test_a_part_without_keys(softcap: float | None, keys: int) -> None:
    """No key at all, or none that a row may see: zero output and lse -inf, never NaN."""
    query, key, value = tensors((1, 4, 2, 3, keys, 16), torch.float32, "cpu")
    mask = None if keys == 0 else torch.zeros(1, 1, 3, keys, dtype=torch.bool)
    request, query = asking(query, key, value, 0.3, softcap=softcap, mask=mask)
    ((places, call),) = backends.calls_for([request], query)
    output, lse, _ = call(query)
    assert places == [0]
    assert torch.equal(output, torch.zeros_like(query))
    assert torch.equal(lse, torch.full((3, 4), -torch.inf))


@pytest.mark.parametrize("chunk", [1, 4096, 2**28])
def test_reference_in_chunks(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    query, key, value = tensors((2, 4, 2, 33, 33, 16), torch.float32, "cpu")
    request, query = asking(query, key, value, 0.3, causal=True)
    whole = backends.reference([request], query)
    monkeypatch.setattr(backends, "SCORE_BYTES", chunk)
    for part, full in zip(backends.reference([request], query)[:2], whole[:2], strict=True):
        torch.testing.assert_close(part, full, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("often", [False, True])
def test_each_request_is_answered_once_by_the_fastest_backend_that_serves_it(often: bool) -> None:
    """What is left over goes to the next one; its answers are in the order of its requests."""
    query = torch.randn(3, 4, 16, generator=torch.Generator().manual_seed(0))
    parts = [tensors((1, 4, 2, 1, n, 16), torch.float32, "cpu")[1:] for n in (7, 4, 9)]
    requests = [
        AttentionRequest(parts, 0.3),
        AttentionRequest(parts[:1], 0.3, 2.0),
        AttentionRequest(parts[1:], 0.3, tokens=torch.tensor([2, 0])),
    ]
    with stand_in.forced("cpu"):
        calls = backends.calls_for(requests, query, often=often)
    assert [places for places, _ in calls] == [[0, 2], [1]]
    for places, call in calls:
        found = call(query, per_part=True)
        right = backends.reference([requests[i] for i in places], query, per_part=True)
        for one, two in zip(found[:2], right[:2], strict=True):
            torch.testing.assert_close(one, two, atol=5e-6, rtol=5e-6)
        for own, wanted in zip(found.parts or (), right.parts or (), strict=True):
            assert (own is None) == (wanted is None)
            if own is not None:
                torch.testing.assert_close(own, wanted, atol=5e-6, rtol=5e-6)
    assert backends.calls_for([], query) == []


KEY, VALUE = torch.zeros(1, 2, 5, 16), torch.zeros(1, 2, 5, 16)
PART, ENDS, QUERY = (KEY, VALUE), torch.tensor([2, 5]), torch.zeros(4, 4, 16)
ROWS = torch.zeros(2, 2, 5, 16), torch.zeros(2, 2, 5, 16)
UNSOUND: dict[str, tuple[AttentionRequest, Tensor]] = {
    "no key": (asked.request([(KEY[:, :, :0], VALUE[:, :, :0])]), QUERY),
    "no key behind some": (asked.request([PART, (KEY[:, :, :0], VALUE[:, :, :0])]), QUERY),
    "fewer kv heads of values": (asked.request([(KEY, VALUE[:, :1])]), QUERY),
    "other kv heads": (asked.request([PART, (KEY[:, :1], VALUE[:, :1])]), QUERY),
    "fewer values": (asked.request([(KEY, VALUE[:, :, :-1])]), QUERY),
    "other head dim": (asked.request([PART]), QUERY[..., :8]),
    "other value dim": (asked.request([PART, (KEY, VALUE[..., :8])]), QUERY),
    "values of another dtype": (asked.request([(KEY, VALUE.half())]), QUERY),
    "keys of another dtype": (asked.request([PART]), QUERY.half()),
    "elsewhere": (asked.request([(KEY.to("meta"), VALUE.to("meta"))]), QUERY),
    "heads in no groups": (asked.request([PART]), QUERY[:, :3]),
    "gradients": (asked.request([PART]), QUERY.clone().requires_grad_()),
    "no token": (asked.request([PART], []), QUERY),
    "a token before the query": (asked.request([PART], [0, -1]), QUERY),
    "a token behind the query": (asked.request([PART], [0, 4]), QUERY),
    "tokens of int32": (replace(asked.request([PART]), tokens=ENDS[:1].int()), QUERY),
    "tokens in no groups": (asked.request([ROWS], [0, 1, 2]), QUERY),
    "a text in several parts": (asked.request([PART, PART], [0, 1], causal=True), QUERY),
    "a text of other tokens": (asked.request([PART], [0, 1], causal=True), QUERY),
    "keys before the first": (asked.request([ROWS], [0, 1], between=(ENDS - 3, ENDS)), QUERY),
    "keys behind the last": (asked.request([ROWS], [0, 1], between=(ENDS * 0, ENDS + 1)), QUERY),
    "no key between": (asked.request([ROWS], [0, 1], between=(ENDS, ENDS)), QUERY),
    "between in other groups": (asked.request([PART], between=(ENDS * 0, ENDS)), QUERY),
    "between in several parts": (
        asked.request([ROWS, ROWS], [0, 1], between=(ENDS * 0, ENDS)),
        QUERY,
    ),
}


@pytest.mark.parametrize("what", UNSOUND)
def test_nothing_that_would_be_read_out_of_bounds_is_sound(what: str) -> None:
    assert not backends.sound(*UNSOUND[what])


def test_what_is_sound() -> None:
    assert backends.sound(asked.request([PART, PART], [0, 3]), QUERY)
    assert backends.sound(asked.request([PART], range(5), causal=True), torch.zeros(5, 4, 16))
    assert backends.sound(asked.request([ROWS], [0, 3], between=(ENDS * 0, ENDS)), QUERY)
