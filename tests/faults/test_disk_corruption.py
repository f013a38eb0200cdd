"""Row: every header bit, payload bits, every 64-byte truncation, junk appended, two files swapped.

Must show: each a miss + quarantine; the batch's other hits still hit; identical.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from rag_windows.cache.entry_file import FormatError, header_length, read_header
from tests.rag_windows.cache.disk_cases import (
    FULL,
    entry_of,
    entry_path,
    key_of,
    right,
    same_window,
    tier,
)

NUMBERS = (1, 2, 3)
VICTIM = 2
KEYS = [key_of(number) for number in NUMBERS]


@pytest.fixture
def whole(tmp_path: Path) -> bytes:
    """Bytes of the victim's file; the folder holds it and two others."""
    before = tier(tmp_path)
    assert all(before.put(key_of(number), entry_of(number)) for number in NUMBERS)
    return entry_path(tmp_path, VICTIM).read_bytes()


def header_end(data: bytes) -> int:
    return header_length(data[:8])


def put_aside(folder: Path) -> int:
    return len(list((folder / "quarantine").iterdir()))


def check_all_missed(folder: Path, damaged: Iterator[bytes]) -> int:
    """Each damaged file is a miss and put aside, the other two are hits and right."""
    reader = tier(folder)
    count = 0
    for data in damaged:
        entry_path(folder, VICTIM).write_bytes(data)
        found = reader.get_many(KEYS)
        assert sorted(found) == sorted(KEYS[i] for i in (0, 2))
        assert right(found[KEYS[0]], 1)
        assert right(found[KEYS[2]], 3)
        count += 1
        assert reader.stats().quarantined == count
        assert not entry_path(folder, VICTIM).exists()
        assert put_aside(folder) >= 1
    # Stored again it is the same as before.
    assert reader.put(KEYS[1], entry_of(VICTIM))
    assert right(reader.get_many(KEYS)[KEYS[1]], VICTIM)
    return count


def flipped(data: bytes, bits: list[int]) -> Iterator[bytes]:
    for bit in bits:
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        yield bytes(changed)


def sample(bits: range, count: int) -> list[int]:
    """So many of them, the same in every run."""
    return sorted(random.Random(1).sample(bits, min(count, len(bits))))


def test_every_header_bit_is_proved(whole: bytes) -> None:
    end = header_end(whole)
    read_header(whole[:end], KEYS[1])
    for changed in flipped(whole[:end], list(range(8 * end))):
        with pytest.raises(FormatError):
            read_header(changed[: header_length(changed[:8])], KEYS[1])


def test_header_bits(tmp_path: Path, whole: bytes) -> None:
    bits = range(8 * header_end(whole))
    wanted = list(bits) if FULL else [*range(0, 64, 5), *sample(bits, 60)]
    assert check_all_missed(tmp_path, flipped(whole, wanted)) == len(wanted)


def test_payload_bits(tmp_path: Path, whole: bytes) -> None:
    bits = range(8 * header_end(whole), 8 * len(whole))
    wanted = sample(bits, 10_000) if FULL else [bits[0], bits[-1], *sample(bits, 60)]
    assert check_all_missed(tmp_path, flipped(whole, wanted)) == len(wanted)


def test_payload_bits_of_a_large_file(tmp_path: Path) -> None:
    """Several digested chunks, and a header behind the first read."""
    entry = entry_of(VICTIM, tokens=9000)
    writer = tier(tmp_path, 1 << 30)
    assert all(writer.put(key, entry_of(n)) for key, n in zip(KEYS, NUMBERS, strict=True))
    assert writer.put(KEYS[1], entry)
    data = entry_path(tmp_path, VICTIM).read_bytes()
    assert same_window(writer.get_many(KEYS)[KEYS[1]].window, entry.window)
    wanted = sample(range(8 * header_end(data), 8 * len(data)), 200 if FULL else 8)
    reader = tier(tmp_path, 1 << 30)
    for changed in flipped(data, wanted):
        entry_path(tmp_path, VICTIM).write_bytes(changed)
        assert sorted(reader.get_many(KEYS)) == sorted((KEYS[0], KEYS[2]))


def test_truncations(tmp_path: Path, whole: bytes) -> None:
    lengths = sorted({*range(0, len(whole), 64), 1, 7, len(whole) - 1})
    assert check_all_missed(tmp_path, (whole[:length] for length in lengths)) == len(lengths)


def test_junk_appended(tmp_path: Path, whole: bytes) -> None:
    junk = [b"\0", b" " * 64, b"junk" * 4096, whole]
    assert check_all_missed(tmp_path, (whole + more for more in junk)) == len(junk)


def test_files_of_other_kinds(tmp_path: Path, whole: bytes) -> None:
    other = tmp_path / "other"
    end = header_end(whole)
    assert tier(other).put(KEYS[0], entry_of(1))
    foreign = [
        b"\0" * len(whole),
        b"\xff" * len(whole),
        whole[:end] + b"\0" * (len(whole) - end),
        whole[end:] + whole[:end],
        entry_path(other, 1).read_bytes(),
    ]
    assert check_all_missed(tmp_path, iter(foreign)) == len(foreign)


def test_two_files_swapped(tmp_path: Path, whole: bytes) -> None:
    one, two = entry_path(tmp_path, 1), entry_path(tmp_path, 2)
    two.write_bytes(one.read_bytes())
    one.write_bytes(whole)
    reader = tier(tmp_path)
    found = reader.get_many(KEYS)
    assert list(found) == [KEYS[2]]
    assert right(found[KEYS[2]], 3)
    assert reader.stats().quarantined == 2
    assert put_aside(tmp_path) == 2


def test_another_stored_form_is_not_found(tmp_path: Path, whole: bytes) -> None:
    assert tier(tmp_path, store="int8").get_many(KEYS) == {}


def test_verify_finds_what_reading_would(tmp_path: Path, whole: bytes) -> None:
    entry_path(tmp_path, VICTIM).write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    reader = tier(tmp_path)
    assert reader.verify() == (3, 1)
    assert reader.verify() == (2, 0)
    assert reader.stats().quarantined == 1
    assert sorted(reader.get_many(KEYS)) == sorted((KEYS[0], KEYS[2]))


def test_put_aside_is_bounded(tmp_path: Path, whole: bytes) -> None:
    limit = 32 * len(whole)
    reader = tier(tmp_path, limit)
    for _ in range(10):
        entry_path(tmp_path, VICTIM).write_bytes(b"\0" * len(whole))
        assert len(reader.get_many(KEYS)) == 2
    assert reader.stats().quarantined == 10
    assert 1 <= put_aside(tmp_path) <= 2  # a sixteenth of the limit
    again = tier(tmp_path, limit)
    for number in range(10, 50):
        again.put(key_of(number), entry_of(number))
    assert put_aside(tmp_path) == 0, "what is put aside goes first when room is needed"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_bytes_swapped_within_the_payload(tmp_path: Path, dtype: torch.dtype) -> None:
    """Sums that forget the order would not see it."""
    writer = tier(tmp_path)
    assert writer.put(KEYS[1], entry_of(VICTIM, dtype=dtype))
    data = entry_path(tmp_path, VICTIM).read_bytes()
    entry_path(tmp_path, VICTIM).write_bytes(data[:-64] + data[-32:] + data[-64:-32])
    assert writer.get_many([KEYS[1]]) == {}
