"""Rows: files damaged, swapped, cut, or overwritten while they are read.

Must show: each a miss, deleted and counted; the batch's other hits still hit; no SIGBUS; tensors
that were read stay as they are.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rag_windows.cache import entry_file
from tests.rag_windows.cache.disk_cases import (
    FULL,
    System,
    end_of,
    entry_of,
    entry_path,
    filled,
    held,
    in_child,
    key_of,
    on,
    right,
    same_window,
    tier,
    warned,
)

NUMBERS = range(1, 4)
VICTIM = 2


@pytest.fixture
def whole(tmp_path: Path) -> bytes:
    """Bytes of the victim's file; the folder holds it and two others."""
    assert held(filled(tmp_path, NUMBERS), NUMBERS) == [1, 2, 3]
    return entry_path(tmp_path, VICTIM).read_bytes()


def end_of_header(data: bytes) -> int:
    return entry_file.header_length(data[:8])


def flipped(data: bytes, bits: list[int]) -> Iterator[bytes]:
    for bit in bits:
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        yield bytes(changed)


def sample(bits: range, count: int) -> list[int]:
    """So many of them, the same in every run."""
    return sorted(random.Random(1).sample(bits, min(count, len(bits))))


def header_bits(data: bytes) -> Iterator[bytes]:
    bits = range(8 * end_of_header(data))
    return flipped(data, list(bits) if FULL else [*range(0, 64, 5), *sample(bits, 60)])


def payload_bits(data: bytes) -> Iterator[bytes]:
    bits = range(8 * end_of_header(data), 8 * len(data))
    return flipped(data, sample(bits, 10_000) if FULL else [bits[0], bits[-1], *sample(bits, 60)])


def truncations(data: bytes) -> Iterator[bytes]:
    for length in sorted({*range(0, len(data), 64), 1, 7, len(data) - 1}):
        yield data[:length]


def others(data: bytes) -> Iterator[bytes]:
    """Junk at the end, files of other kinds and of an older version, bytes in another order."""
    end = end_of_header(data)
    yield from (data + more for more in (b"\0", b" " * 64, b"junk" * 4096, data))
    yield from (b"\0" * len(data), b"\xff" * len(data), data[end:] + data[:end])
    yield data[:end] + b"\0" * (len(data) - end)
    yield data[:-64] + data[-32:] + data[-64:-32]
    yield data.replace(b"rag-windows window 2", b"rag-windows window 1")


@pytest.mark.parametrize("damage", [header_bits, payload_bits, truncations, others])
def test_damaged_files_are_misses_and_deleted(
    tmp_path: Path, whole: bytes, damage: Callable[[bytes], Iterator[bytes]], caplog: object
) -> None:
    reader = tier(tmp_path)
    count = 0
    for data in damage(whole):
        entry_path(tmp_path, VICTIM).write_bytes(data)
        assert held(reader, NUMBERS) == [1, 3]
        count += 1
        assert reader.stats().quarantined == count
        assert not entry_path(tmp_path, VICTIM).exists()
    assert count > 0
    assert warned(caplog) == 1, "said once"
    # Stored again it is the same as before.
    assert reader.put(key_of(VICTIM), entry_of(VICTIM))
    assert held(reader, NUMBERS) == [1, 2, 3]


def test_every_header_bit_is_proved(whole: bytes) -> None:
    end = end_of_header(whole)
    entry_file.read_header(whole[:end], key_of(VICTIM))
    for changed in flipped(whole[:end], list(range(8 * end))):
        with pytest.raises(entry_file.FormatError):
            entry_file.read_header(changed[: end_of_header(changed)], key_of(VICTIM))


def test_payload_bits_of_a_large_file(tmp_path: Path, whole: bytes) -> None:
    """Several digested chunks, and a header behind the first read."""
    entry = entry_of(VICTIM, tokens=9000)
    reader = tier(tmp_path, 1 << 30)
    assert reader.put(key_of(VICTIM), entry)
    data = entry_path(tmp_path, VICTIM).read_bytes()
    assert same_window(reader.get_many([key_of(VICTIM)])[key_of(VICTIM)].window, entry.window)
    bits = range(8 * end_of_header(data), 8 * len(data))
    for changed in flipped(data, sample(bits, 200 if FULL else 8)):
        entry_path(tmp_path, VICTIM).write_bytes(changed)
        assert held(reader, NUMBERS) == [1, 3]


def test_two_files_swapped(tmp_path: Path, whole: bytes) -> None:
    one, two = entry_path(tmp_path, 1), entry_path(tmp_path, 2)
    two.write_bytes(one.read_bytes())
    one.write_bytes(whole)
    reader = tier(tmp_path)
    assert held(reader, NUMBERS) == [3]
    assert reader.stats().quarantined == 2


def test_packed_windows_are_not_found_by_a_tier_of_what_was_computed(tmp_path: Path) -> None:
    """The other way round they are: a store of 8 bits holds a prefix as it was computed."""
    coded = tier(tmp_path / "coded", store="int8")
    for number in NUMBERS:
        coded.put(key_of(number), entry_of(number))
    keys = [key_of(number) for number in NUMBERS]
    assert coded.get_many(keys).keys() == {*keys}
    assert not tier(tmp_path / "coded").get_many(keys)
    filled(tmp_path / "plain", NUMBERS)
    assert held(tier(tmp_path / "plain", store="int8"), NUMBERS) == [1, 2, 3]


def test_verify_finds_what_reading_would(tmp_path: Path, whole: bytes) -> None:
    entry_path(tmp_path, VICTIM).write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    reader = tier(tmp_path)
    assert [reader.verify(), reader.verify()] == [(3, 1), (2, 0)]
    assert reader.stats().quarantined == 1
    assert held(reader, NUMBERS) == [1, 3]


TOKENS = 60_000
"""Enough for many pages and several reads."""


def truncate(path: Path) -> None:
    os.truncate(path, 0)


def shorten(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def overwrite(path: Path) -> None:
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.write(b"\xff" * size)


def remove(path: Path) -> None:
    path.unlink()


@pytest.mark.parametrize("damage", [truncate, shorten, overwrite, remove])
@pytest.mark.parametrize("at_read", [2, 3, 5, None])
def test_overwritten_while_it_is_read_and_after(
    tmp_path: Path, damage: Callable[[Path], None], at_read: int | None
) -> None:
    """In a child: reading a mapped file that was cut would kill it."""
    assert tier(tmp_path, 1 << 30).put(key_of(1), entry_of(1, TOKENS))

    def work() -> None:
        with on(System()) as system:
            reader = tier(tmp_path, 1 << 30)
            opening = len(system.calls)

            def on_call(number: int, name: str) -> None:
                if name == "preadv" and system.calls[opening:].count("preadv") == at_read:
                    damage(entry_path(tmp_path, 1))

            system.on_call = on_call
            found = reader.get_many([key_of(1)])
        if at_read is None:
            damage(entry_path(tmp_path, 1))
        if at_read is None or damage is remove:  # the file lives on until it is closed
            assert right(found[key_of(1)], 1, TOKENS)
        else:
            assert found == {}
            assert reader.stats().quarantined == 1

    assert end_of(in_child(work)) == 0
