"""Files of entries: a safetensors container, nothing lost, everything checked."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest
import torch
from safetensors.torch import load

from rag_windows.cache.codec import AsComputed, Entry, Stored, codec_named
from rag_windows.cache.entry_file import (
    ALIGNMENT,
    DIGESTS,
    DTYPES,
    LENGTH_BYTES,
    FormatError,
    decode,
    header_bytes,
    header_length,
    image_of,
    read_note,
)
from rag_windows.kv import Window
from tests.rag_windows.cache.disk_cases import entry_of, key_of, same_window

KEY = key_of(1)


def file_of(entry: Entry, digest: str = "xxh3-128", store: str = "as computed") -> bytes:
    image = image_of(KEY, entry, codec_named(store), digest)
    data = image.header + b"".join(image.payload)
    assert len(data) == image.nbytes
    return data


def read_back(data: bytes, store: str = "as computed") -> Entry:
    end = header_length(data)
    note = read_note(data[:end], KEY)
    payload = torch.frombuffer(bytearray(data[end:] or b"\0"), dtype=torch.uint8)
    return decode(note, payload[: len(data) - end], codec_named(store))


def noise(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape).to(dtype)


MIXED = Window(
    # Layers that differ in heads, widths and dtypes; views of larger tensors, not contiguous.
    ids=(5, 1, 2**40),
    start=7,
    keys=(
        noise(2, 3, 8, dtype=torch.bfloat16),
        noise(1, 9, 4)[:, ::3],
        noise(3, 2, 6).mT[:, :3].half(),
    ),
    values=(noise(2, 3, 5, dtype=torch.bfloat16), noise(1, 3, 4), noise(2, 3, 1).double()),
)


@pytest.mark.parametrize("digest", sorted(DIGESTS))
def test_nothing_is_lost(digest: str) -> None:
    entry = Entry(MIXED, 0.125, ("a", "ü\n\0", ""), 12.5, 99.25)
    found = read_back(file_of(entry, digest))
    assert same_window(found.window, MIXED)
    assert dataclasses.replace(found, window=MIXED) == entry


@pytest.mark.parametrize("store", ["as computed", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_stored_form(store: str, dtype: torch.dtype) -> None:
    entry = entry_of(3, tokens=17, dtype=dtype)
    codec = codec_named(store)
    found = read_back(file_of(entry, store=store), store).window
    wanted = codec.decode(codec.encode(entry.window), entry.window.ids, entry.window.start)
    assert same_window(found, wanted)


def test_a_window_without_tokens_or_layers() -> None:
    empty = Window((), 0, (noise(2, 0, 4),), (noise(2, 0, 4),))
    assert same_window(read_back(file_of(Entry(empty, 0.0, (), 0.0))).window, empty)
    none = Window((), 0, (), ())
    assert same_window(read_back(file_of(Entry(none, 0.0, (), 0.0))).window, none)


def test_any_safetensors_reader_reads_it() -> None:
    entry = entry_of(2)
    found = load(file_of(entry))
    assert torch.equal(found["run0"], torch.stack(entry.window.keys))
    assert torch.equal(found["run1"], torch.stack(entry.window.values))


def test_layers_of_one_shape_are_one_tensor() -> None:
    layer = torch.ones(2, 3, 4)
    window = Window((1, 2, 3), 0, (layer,) * 30, (layer,) * 30)
    assert sorted(load(file_of(Entry(window, 0.0, (), 0.0)))) == ["run0"]


def test_tensors_are_aligned() -> None:
    data = file_of(Entry(MIXED, 0.0, (), 0.0))
    end = header_length(data)
    assert end % ALIGNMENT == 0
    for slot in read_note(data[:end], KEY).slots:
        assert slot.begin % slot.dtype.itemsize == 0


def test_overhead_is_small() -> None:
    entry = entry_of(1, tokens=256)
    assert len(file_of(entry)) - entry.nbytes < 1024


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_times_that_are_no_numbers(number: float) -> None:
    found = read_back(file_of(Entry(MIXED, number, (), number, number)))
    assert (found.cost_s, found.created, found.expires) == (0.0, 0.0, 0.0)
    assert found.expired(1.0)


def test_dtypes_that_are_not_storable() -> None:
    class Other(AsComputed):
        def encode(self, window: Window) -> Stored:
            return Stored((torch.ones(1, dtype=torch.complex64),), {})

    with pytest.raises(FormatError, match="complex"):
        image_of(KEY, entry_of(1), Other(), "sha256")
    for dtype in DTYPES.values():
        if dtype.is_floating_point and dtype.itemsize > 1:
            some = entry_of(1, dtype=dtype)
            assert same_window(read_back(file_of(some)).window, some.window)


def changed(note: dict[str, Any]) -> bytes:
    """A file's header with a right seal and another note."""
    data = file_of(entry_of(1))
    header = data[: header_length(data)]
    before = json.loads(json.loads(header[LENGTH_BYTES:])["__metadata__"]["note"])
    return header_bytes({**before, **note}, read_note(header, KEY).slots)


@pytest.mark.parametrize(
    "note",
    [
        {"key": key_of(2)},
        {"key": None},
        {"labels": [1]},
        {"labels": 5},
        {"start": -1},
        {"start": True},
        {"start": "0"},
        {"codec": None},
        {"description": []},
        {"runs": []},
        {"runs": [[0, 1], [2, 2]]},
        {"runs": [[0], [1, 2, 3]]},
        {"runs": [[0, 1], [2, 4]]},
        {"runs": [[-1, 0], [1, 2]]},
        {"runs": 7},
        {"digest": ["md5", "00"]},
        {"digest": ["xxh3-128"]},
        {"created": {}},
        {"expires": "soon"},
    ],
    ids=json.dumps,
)
def test_a_right_seal_does_not_make_a_note_right(note: dict[str, Any]) -> None:
    read_note(changed({}), KEY)
    with pytest.raises(FormatError):
        read_note(changed(note), KEY)


def test_tensors_and_form_must_fit() -> None:
    data = file_of(entry_of(1))
    payload = torch.frombuffer(bytearray(data[header_length(data) :]), dtype=torch.uint8)
    note = read_note(changed({"description": {"layers": 1}}), KEY)
    with pytest.raises(RuntimeError, match="layers"):
        decode(note, payload, AsComputed())


@pytest.mark.parametrize("start", [b"", b"\0" * 8, b"\xff" * 8, b"\x39" + b"\0" * 7])
def test_impossible_header_lengths(start: bytes) -> None:
    with pytest.raises(FormatError):
        header_length(start)


def test_stored_forms_may_hold_one_tensor_twice() -> None:
    shared = torch.ones(1, 2, 3)
    window = Window((1, 2), 0, (shared,), (shared,))
    assert isinstance(AsComputed().encode(window), Stored)
    assert same_window(read_back(file_of(Entry(window, 0.0, (), 0.0))).window, window)
