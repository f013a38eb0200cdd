"""The forms in which windows are stored."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from rag_windows import CacheError, InputError, NonFiniteError
from rag_windows.cache.codec import Stored, codec_named, require_finite, settle
from rag_windows.kv import Window
from tests.rag_windows.cache.windows import same, window

FORMS = ("as computed", "int8")
LOSSY = ("int8",)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def decoded(name: str, original: Window) -> Window:
    codec = codec_named(name)
    stored = codec.encode(original)
    description = json.loads(json.dumps(dict(stored.description)))  # as a file's header keeps it
    return codec.decode(Stored(stored.tensors, description), original.ids, original.start)


def pairs(one: Window, other: Window) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return list(zip((*one.keys, *one.values), (*other.keys, *other.values), strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_as_computed_is_exact_and_copies_nothing(dtype: torch.dtype) -> None:
    original = window(dtype=dtype)
    again = decoded("as computed", original)
    assert same(original, again)
    assert all(a.data_ptr() == b.data_ptr() for a, b in pairs(original, again))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LOSSY)
def test_the_error_is_bounded_channel_by_channel(name: str, dtype: torch.dtype) -> None:
    original = window(64, dtype=dtype)
    for exact, lossy in pairs(original, decoded(name, original)):
        assert (exact.dtype, exact.shape) == (lossy.dtype, lossy.shape)
        x, y = exact.double(), lossy.double()
        peak = x.abs().amax(dim=1, keepdim=True)
        rounding = torch.finfo(dtype).eps * x.abs() + 1e-7
        bound = peak / 127 / 2
        assert bool(((x - y).abs() <= 1.001 * bound + rounding).all())
        assert torch.equal(y.abs().amax(dim=1, keepdim=True), peak)


@pytest.mark.parametrize("magnitude", [1e-30, 1e-6, 1.0, 3e3])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LOSSY)
def test_what_was_decoded_once_changes_no_more(
    name: str, dtype: torch.dtype, magnitude: float
) -> None:
    drawn = window(40, seed=5)
    scaled = replace(
        drawn,
        keys=tuple(t.clamp(-20, 20).mul(magnitude).to(dtype) for t in drawn.keys),
        values=tuple(t.clamp(-20, 20).mul(magnitude).to(dtype) for t in drawn.values),
    )
    once = settle(codec_named(name), scaled)
    assert same(once, settle(codec_named(name), once))
    assert same(scaled, settle(codec_named("as computed"), scaled))


@pytest.mark.parametrize("name", LOSSY)
def test_zeros_stay_zeros(name: str) -> None:
    original = window()
    original.keys[0][:, :, 2] = 0.0
    assert not decoded(name, original).keys[0][:, :, 2].any()


@pytest.mark.parametrize("name", LOSSY)
def test_8_bits_a_number_and_one_float_a_channel(name: str) -> None:
    original = window(256, dtype=torch.bfloat16)
    numbers = sum(t.numel() for t in (*original.keys, *original.values))
    channels = sum(t.shape[0] * t.shape[2] for t in (*original.keys, *original.values))
    assert codec_named(name).encode(original).nbytes == numbers + 4 * channels


@pytest.mark.parametrize("name", LOSSY)
def test_layers_of_one_shape_are_one_tensor(name: str) -> None:
    alike = window(shapes=((2, 6, 6),) * 5)
    assert len(codec_named(name).encode(alike).tensors) == 2


@pytest.mark.parametrize("part", ["keys", "values"])
@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", FORMS)
def test_nan_and_infinity_are_refused(name: str, number: float, part: str) -> None:
    bad = window(dtype=torch.bfloat16)
    getattr(bad, part)[1][1, 7, 3] = number
    with pytest.raises(NonFiniteError, match=f"the {part} of layer 1 hold NaN or infinity"):
        codec_named(name).encode(bad)


def test_the_largest_numbers_are_no_infinity() -> None:
    original = window(dtype=torch.float16)
    original.keys[0][0, 0] = torch.finfo(torch.float16).max
    require_finite(original)
    for name in LOSSY:
        assert all(bool(t.isfinite().all()) for t in decoded(name, original).keys)


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize(
    "description",
    [
        {},
        {"layers": "3"},
        {"layers": True},
        {"layers": 4, "groups": [[0, 1, 3, 4], [2], [5]], "dtypes": ["float32"] * 3},
        {"layers": 3, "groups": [[0, 1, 3, 4], [2], [2]], "dtypes": ["float32"] * 3},
        {"layers": 3, "groups": [[0, 1, 3, 4], [2], [7]], "dtypes": ["float32"] * 3},
        {"layers": 3, "groups": [[0, 1, 3, 4], [2], ["5"]], "dtypes": ["float32"] * 3},
        {"layers": 3, "groups": [[0, 1, 3, 4], 2, [5]], "dtypes": ["float32"] * 3},
        {"layers": 3, "groups": [[0, 1, 3, 4], [2], [5]], "dtypes": ["float32"] * 2},
        {"layers": 3, "groups": [[0, 1, 3, 4], [2], [5]], "dtypes": ["int64"] * 3},
    ],
)
def test_a_description_that_does_not_fit_is_refused(name: str, description: Any) -> None:
    codec, original = codec_named(name), window()
    stored = codec.encode(original)
    if name == "as computed" and description.get("layers") == 3:
        description = {"layers": 2}
    with pytest.raises(CacheError):
        codec.decode(Stored(stored.tensors, description), original.ids, original.start)


@pytest.mark.parametrize("name", FORMS)
def test_tensors_that_do_not_fit_are_refused(name: str) -> None:
    codec, original = codec_named(name), window()
    stored = codec.encode(original)
    first, *rest = stored.tensors
    broken = [
        stored.tensors[:-1],
        (first[..., None], *rest),
        (first[:, :, :-1], *rest),
        (first.to(torch.int64), *rest),
    ]
    for tensors in broken[: 2 if name == "as computed" else None]:
        with pytest.raises(CacheError):
            codec.decode(Stored(tuple(tensors), stored.description), original.ids, 3)
    with pytest.raises(CacheError, match="9 tokens"):
        codec.decode(stored, (*original.ids, 1), original.start)


def test_an_unknown_form_is_refused() -> None:
    with pytest.raises(InputError, match=r"'zip'.*'as computed', 'int8'"):
        codec_named("zip")


@pytest.mark.parametrize("name", LOSSY)
def test_a_dtype_that_is_not_known_is_refused(name: str) -> None:
    with pytest.raises(CacheError, match="int32"):
        codec_named(name).encode(window(dtype=torch.int32))
