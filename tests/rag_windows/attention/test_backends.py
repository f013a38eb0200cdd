"""Every attention backend against an explicit float64 softmax: one matrix for all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rag_windows.attention import backends
from rag_windows.attention.backends import AttentionRequest, Backend

from . import stand_in

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


def exact(request: AttentionRequest, query: Tensor) -> tuple[Tensor, Tensor]:
    """Output and lse in float64, by explicit softmax; zero and -inf where a row sees nothing."""
    key, value = (one.double().cpu() for one in request.parts[0])
    groups = query.shape[1] // key.shape[1]
    asked = query.double().cpu().unflatten(0, (request.groups, -1)).transpose(1, 2)
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    logits = asked @ key.mT * request.scale
    if request.softcap is not None:
        logits = request.softcap * (logits / request.softcap).tanh()
    logits = logits / request.temperature
    rows, keys = logits.shape[-2:]
    seen = torch.ones(rows, keys, dtype=torch.bool)
    if request.mask is not None:
        seen = request.mask.cpu()
    elif request.causal:
        seen = seen.tril()
    logits = logits.masked_fill(~seen, -torch.inf)
    output = logits.softmax(-1).nan_to_num(0.0) @ value
    return output.transpose(1, 2).flatten(0, 1), logits.logsumexp(-1).transpose(1, 2).flatten(0, 1)


def check(name: str, request: AttentionRequest, query: Tensor) -> None:
    """The backend agrees, or leaves the request to the reference for a reason that we know of."""
    one, _ = backend(name)
    if not one.serves(request, query):
        assert request.softcap is not None
        return
    output, lse, parts = one.prepare([request], query)(query, per_part=True)
    expected, expected_lse = exact(request, query)
    dtype = query.dtype
    tolerance, lse_tolerance = OUTPUT_TOLERANCE[dtype], LSE_TOLERANCE[dtype]
    assert parts == [None]
    assert output.dtype == dtype
    assert output.shape == expected.shape
    assert lse.dtype == torch.float32
    assert lse.shape == expected_lse.shape
    torch.testing.assert_close(output.double().cpu(), expected, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(lse.double().cpu(), expected_lse, atol=lse_tolerance, rtol=2e-6)


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
    expected, expected_lse = exact(request, query)
    assert bool(torch.isfinite(output).all())
    assert bool(torch.isfinite(lse).all())
    torch.testing.assert_close(lse.double().cpu(), expected_lse, rtol=1e-5, atol=1e-2)
    if size < 100:
        # Rounding of logits this large shifts the softmax between near ties.
        torch.testing.assert_close(output.double().cpu(), expected, atol=2e-2, rtol=2e-2)


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
