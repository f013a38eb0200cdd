"""The Triton kernels beyond the matrix of all backends: splits, the merge, and the guard."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rag_windows.attention import backends
from rag_windows.attention.backends import Request, reference, triton_decode, triton_launch
from rag_windows.attention.kernels import loading
from rag_windows.attention.merge import merge, merge_weights

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float32: 5e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}
DTYPES = tuple(TOLERANCE)


def draw(dtype: torch.dtype, *size: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(size))
    return torch.randn(*size, generator=generator).to(DEVICE, dtype)


def close(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    torch.testing.assert_close(
        actual.float(), expected.float(), atol=tolerance, rtol=max(tolerance, 1e-6)
    )


def compare(request: Request, splits: int | None) -> None:
    output, lse = triton_launch.attend(request, splits)
    expected, expected_lse = reference.attend(request)
    assert output.dtype == request.query.dtype
    close(output, expected, TOLERANCE[request.query.dtype])
    assert torch.equal(lse == -torch.inf, expected_lse == -torch.inf)
    close(lse, expected_lse, 2e-5)


@settings(max_examples=15)
@given(
    dtype=st.sampled_from(DTYPES),
    batch=st.integers(1, 2),
    kv_heads=st.integers(1, 3),
    groups=st.integers(1, 3),
    rows=st.integers(1, 9),
    keys=st.integers(1, 300),
    dim=st.sampled_from([8, 64, 80, 96]),
    splits=st.integers(1, 5),
    softcap=st.sampled_from([None, 2.0]),
    temperature=st.sampled_from([1.0, 0.4]),
    density=st.sampled_from([None, 0.0, 0.02, 0.5]),
)
def test_any_shape_and_split(
    dtype: torch.dtype,
    batch: int,
    kv_heads: int,
    groups: int,
    rows: int,
    keys: int,
    dim: int,
    splits: int,
    softcap: float | None,
    temperature: float,
    density: float | None,
) -> None:
    """Also splits in which rows see nothing, rows that see nothing at all, and empty splits."""
    mask = None
    if density is not None:
        generator = torch.Generator().manual_seed(keys)
        mask = (torch.rand(batch, 1, rows, keys, generator=generator) < density).to(DEVICE)
    request = Request(
        draw(dtype, batch, kv_heads * groups, rows, dim),
        draw(dtype, batch, kv_heads, keys, dim),
        draw(dtype, batch, kv_heads, keys, dim, seed=1),
        0.2,
        temperature=temperature,
        softcap=softcap,
        mask=mask,
    )
    compare(request, splits)


@pytest.mark.parametrize("dim", [128, 256])
@pytest.mark.parametrize("keys", [1, 200])
def test_large_heads(dim: int, keys: int) -> None:
    tensors = [draw(torch.bfloat16, 1, heads, n, dim) for heads, n in ((2, 1), (1, keys))]
    compare(Request(tensors[0], tensors[1], tensors[1], dim**-0.5), 2)


def test_one_long_split_and_keys_that_are_views() -> None:
    """A shelf's windows are views: heads lie further apart than their tokens need."""
    shelf = draw(torch.float32, 2, 900, 16)
    keys, values = shelf[:, 100:801], shelf[:, 150:851]
    request = Request(draw(torch.float32, 1, 4, 1, 16), keys.unsqueeze(0), values.unsqueeze(0), 0.3)
    compare(request, 1)
    swapped = shelf.transpose(0, 1).contiguous().transpose(0, 1)[:, 100:801]
    compare(Request(request.query, swapped.unsqueeze(0), request.value, 0.3), None)


def folded(query: Tensor, kv_heads: int) -> Tensor:
    """As the hook folds a query over the context."""
    grouped = query.unflatten(1, (kv_heads, -1))
    return grouped.transpose(0, 1).flatten(1, 3).unsqueeze(0)


Merged = tuple[Tensor, Tensor]


def merged_both_ways(
    dtype: torch.dtype,
    affine: tuple[float, float],
    segments: int,
    with_sink: bool,
    mask: Callable[[int, int], Tensor] | None = None,
    empty: bool = False,
) -> Merged:
    """The kernels' merge, and steps in fp32 that end in the same."""
    batch, heads, kv_heads, rows, keys, dim = 2, 6, 2, 3, 150, 24
    query = draw(dtype, batch, heads, rows, dim)
    key, value = (draw(dtype, 1, kv_heads, keys, dim, seed=seed) for seed in (1, 2))
    seen = None if mask is None else mask(batch * 3 * rows, keys).to(DEVICE)
    request = Request(folded(query, kv_heads), key, value, 0.4, temperature=0.7, mask=seen)
    others = [
        (
            draw(dtype, batch, heads, rows, dim, seed=seed),
            draw(torch.float32, batch, heads, rows, seed=seed) - (torch.inf if empty else 0.0),
        )
        for seed in range(segments)
    ]
    sink = draw(dtype, heads, seed=5) if with_sink else None
    actual = triton_launch.attend_merged(request, batch, rows, others, affine, sink, splits=2)
    wide = Request(
        request.query.float(), key.float(), value.float(), 0.4, temperature=0.7, mask=seen
    )
    output, lse = (
        part.squeeze(0).unflatten(1, (batch, 3, rows)).transpose(0, 1).flatten(1, 2)
        for part in reference.attend(wide)
    )
    outputs = [*(other.float() for other, _ in others), output]
    lses = [*(other for _, other in others), affine[0] * lse + affine[1]]
    weights = merge_weights(lses, None if sink is None else sink.float().view(1, -1, 1))
    return actual, merge(outputs, weights).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("affine", [(1.0, 0.0), (0.8, -0.3)])
@pytest.mark.parametrize(("segments", "with_sink"), [(1, False), (2, False), (1, True), (2, True)])
def test_merge(
    dtype: torch.dtype, affine: tuple[float, float], segments: int, with_sink: bool
) -> None:
    actual, expected = merged_both_ways(dtype, affine, segments, with_sink)
    assert actual.dtype == dtype
    assert actual.transpose(1, 2).is_contiguous()
    close(actual, expected, TOLERANCE[dtype])


def test_merge_of_a_context_that_some_rows_do_not_reach() -> None:
    def mask(rows: int, keys: int) -> Tensor:
        return torch.arange(rows).unsqueeze(-1) % 2 == torch.zeros(keys)

    close(*merged_both_ways(torch.float32, (0.8, 0.2), 1, False, mask), 5e-6)


@pytest.mark.parametrize("with_sink", [False, True])
def test_merge_of_empty_segments_is_zero(with_sink: bool) -> None:
    def nothing(rows: int, keys: int) -> Tensor:
        return torch.zeros(rows, keys, dtype=torch.bool)

    actual, _ = merged_both_ways(torch.float32, (0.8, 0.2), 2, with_sink, nothing, empty=True)
    assert torch.equal(actual, torch.zeros_like(actual))


def test_the_scale_of_a_far_context_stays_finite() -> None:
    """exp of an lse of 10,000 is far beyond fp32; only differences may be raised."""
    query = draw(torch.float32, 1, 2, 1, 16)
    request = Request(query, query * 1e4, query, 0.3)
    other = draw(torch.float32, 1, 2, 1, 16, seed=1), torch.full((1, 2, 1), -1e4, device=DEVICE)
    close(triton_launch.attend_merged(request, 1, 1, [other], (0.9, 0.0)), query, 1e-6)


def small() -> Request:
    query, key, value = (draw(torch.float32, 1, 2, n, 12) for n in (3, 40, 40))
    return Request(query, key, value, 0.3)


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """The guard has not asked anything yet, and forgets what it is told here."""
    monkeypatch.setattr(triton_decode, "_agrees", triton_decode._agrees.__wrapped__)


def test_without_triton_the_others_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_decode, "kernels", lambda: None)
    assert not triton_decode.serves(small())
    with backends.forced("triton"):
        for answer, expected in zip(
            backends.attend(small()), reference.attend(small()), strict=True
        ):
            assert torch.equal(answer, expected)


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("fault", ["wrong output", "wrong lse", "wrong merge", "error"])
def test_a_kernel_that_errs_is_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    attend, attend_merged = triton_decode.attend, triton_decode.attend_merged

    def bad(*args: Any, **kwargs: Any) -> Any:
        if fault == "error":
            raise RuntimeError("no such instruction")
        output, lse = attend(*args, **kwargs)
        return output + (fault == "wrong output"), lse + 0.01 * (fault == "wrong lse")

    def bad_merge(*args: Any, **kwargs: Any) -> Any:
        return attend_merged(*args, **kwargs) * (1.01 if fault == "wrong merge" else 1.0)

    assert triton_decode.serves(small())
    monkeypatch.setattr(triton_decode, "attend", bad)
    monkeypatch.setattr(triton_decode, "attend_merged", bad_merge)
    with caplog.at_level(logging.WARNING):
        assert not triton_decode.serves(small())
    assert "no such instruction" in caplog.text or "differ from the reference" in caplog.text


def test_kernels_are_compiled_for_a_device_only() -> None:
    loaded = loading.kernels()
    assert loaded is not None
    assert loaded.interpreted == (DEVICE == "cpu")


def test_what_does_not_fit() -> None:
    fits = triton_launch.fits
    good = small()
    assert fits(good)
    query, key, value = good.query, good.key, good.value
    assert not fits(Request(key, key, value, 0.3, causal=True))
    assert not fits(Request(query.double(), key.double(), value.double(), 0.3))
    assert not fits(Request(query, key.half(), value.half(), 0.3))
    assert not fits(Request(query, key[:, :, :0], value[:, :, :0], 0.3))
    assert not fits(Request(query, key.mT.contiguous().mT, value, 0.3))
    assert not fits(Request(query.repeat(1, 1, 200, 1), key, value, 0.3))
    assert not fits(Request(query.clone().requires_grad_(), key, value, 0.3))
    large = draw(torch.float32, 1, 2, 3, 264)
    assert not fits(Request(large, large, large, 0.3))


def test_only_affine_contexts_are_merged_by_the_kernel() -> None:
    request = small()
    segment = reference.attend(request)
    with backends.forced("triton"):
        assert backends.attend_merged(request, 1, 3, [segment], None, None) is None
        assert backends.attend_merged(request, 1, 3, [segment] * 3, (1.0, 0.0), None) is None
        whole = backends.attend_merged(request, 1, 3, [segment], (1.0, math.log(3)), None)
    assert whole is not None
    # The same answer twice, whatever the weights.
    close(whole, segment[0], 1e-6)
    assert (backends.attend_merged(request, 1, 3, [segment], (1.0, 0.0), None) is None) == (
        DEVICE == "cpu"
    )


def test_an_unknown_backend_cannot_be_forced() -> None:
    with pytest.raises(KeyError, match="tpu"), backends.forced("tpu"):
        pass
