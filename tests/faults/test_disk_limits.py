"""Row: size under the cap (files found at start count); usage and time limits over restarts."""

from __future__ import annotations

import dataclasses
import threading
import time
from pathlib import Path

import pytest

from rag_windows import InputError
from rag_windows.cache.codec import Entry
from rag_windows.cache.disk import DiskTier
from tests.rag_windows.cache.disk_cases import (
    entry_of,
    entry_path,
    folder_bytes,
    key_of,
    names,
    right,
    tier,
)

SIZE = 1200
"""More than a file of `entry_of` takes, and less than two."""


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1_000_000.0
        monkeypatch.setattr(time, "time", lambda: self.now)


def fill(user: DiskTier, numbers: range) -> None:
    for number in numbers:
        user.put(key_of(number), entry_of(number))


@pytest.mark.parametrize("limit", [SIZE, 5 * SIZE, 20 * SIZE])
def test_never_over_the_limit(tmp_path: Path, limit: int) -> None:
    user = tier(tmp_path, limit)
    for number in range(40):
        user.get_many([key_of(number)])
        user.put(key_of(number), entry_of(number))
        assert folder_bytes(tmp_path) <= limit
    stats = user.stats()
    assert stats.entries == len(names(tmp_path)) >= limit // SIZE - 1
    assert stats.bytes == folder_bytes(tmp_path)
    assert stats.stored == stats.entries + stats.evictions
    assert stats.stored + stats.refused == 40


def test_files_found_at_the_start_count(tmp_path: Path) -> None:
    fill(tier(tmp_path), range(20))
    user = tier(tmp_path, 5 * SIZE)
    assert 0 < folder_bytes(tmp_path) <= 5 * SIZE
    assert user.stats().evictions == 20 - len(names(tmp_path))


def test_prune_applies_the_limit_to_what_others_left(tmp_path: Path) -> None:
    small = tier(tmp_path, 5 * SIZE)
    fill(tier(tmp_path), range(20))
    small.prune(0.0)
    assert 0 < folder_bytes(tmp_path) <= 5 * SIZE


def test_too_large_is_refused(tmp_path: Path) -> None:
    user = tier(tmp_path, SIZE)
    assert not user.put(key_of(1), entry_of(1, tokens=500))
    assert user.stats().refused == 1
    assert names(tmp_path) == []
    assert not tier(tmp_path / "none", 0).put(key_of(1), entry_of(1))


def test_what_is_used_survives_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Frequency counts, not only who was last."""
    clock = Clock(monkeypatch)
    user = tier(tmp_path)
    fill(user, range(10))
    for _ in range(20):
        clock.now += 10
        user.get_many([key_of(0), key_of(5)])
    clock.now += 10
    user.get_many([key_of(9)])
    user.write_uses()
    kept = tier(tmp_path, 4 * SIZE)
    found = kept.get_many([key_of(n) for n in range(10)])
    assert key_of(0) in found
    assert key_of(5) in found


def test_what_costs_much_survives_a_restart(tmp_path: Path) -> None:
    user = tier(tmp_path)
    for number in range(10):
        entry = dataclasses.replace(entry_of(number), cost_s=30.0 if number == 3 else 0.01)
        assert user.put(key_of(number), entry)
    assert key_of(3) in tier(tmp_path, 2 * SIZE)


def test_put_again_replaces(tmp_path: Path) -> None:
    user = tier(tmp_path, 3 * SIZE)
    assert user.put(key_of(1), entry_of(1))
    for labels in (("other",), ("document", "other")):
        assert user.put(key_of(1), dataclasses.replace(entry_of(1), labels=labels))
        assert user.get_many([key_of(1)])[key_of(1)].labels == labels
    assert user.keys_with({"other"}) == [key_of(1)]
    assert folder_bytes(tmp_path) == user.stats().bytes <= SIZE
    # What it took before is free again.
    for number in range(2, 4):
        assert user.put(key_of(number), entry_of(number))
    assert user.stats().entries == 3


def expiring(number: int, at: float) -> Entry:
    return dataclasses.replace(entry_of(number), expires=at)


def test_expired_entries_are_misses_and_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    user = tier(tmp_path)
    assert user.put(key_of(1), expiring(1, clock.now + 10))
    assert user.put(key_of(2), expiring(2, clock.now + 20))
    assert user.put(key_of(3), entry_of(3))
    assert len(user.get_many([key_of(n) for n in (1, 2, 3)])) == 3
    clock.now += 10
    assert sorted(user.get_many([key_of(n) for n in (1, 2, 3)])) == sorted((key_of(2), key_of(3)))
    assert not entry_path(tmp_path, 1).exists()
    assert user.prune(clock.now) == 0
    assert user.prune(clock.now + 10) == 1
    assert names(tmp_path) == [entry_path(tmp_path, 3).name]
    assert user.stats().expired == 2
    assert user.stats().quarantined == 0


def test_labels(tmp_path: Path) -> None:
    user = tier(tmp_path)
    fill(user, range(4))
    strange = dataclasses.replace(entry_of(5), labels=('"\\\n', "ü" * 9000))
    assert user.put(key_of(5), strange)
    assert user.get_many([key_of(5)])[key_of(5)].labels == strange.labels
    assert user.keys_with(["ü" * 9000]) == [key_of(5)]
    assert user.keys_with([]) == []
    endless = dataclasses.replace(entry_of(6), labels=tuple("x" * 1000 for _ in range(2000)))
    assert not user.put(key_of(6), endless)


def test_remove_and_clear(tmp_path: Path) -> None:
    user = tier(tmp_path)
    fill(user, range(6))
    assert user.remove([key_of(1), key_of(2), key_of(99)]) == 2
    assert user.stats().removed == 2
    assert user.stats().entries == 4
    entry_path(tmp_path, 3).write_bytes(b"junk")
    user.get_many([key_of(3)])
    user.clear()
    assert names(tmp_path) == []
    assert folder_bytes(tmp_path) == 0
    assert user.put(key_of(1), entry_of(1))
    assert right(user.get_many([key_of(1)])[key_of(1)], 1)


def test_closed_it_misses(tmp_path: Path) -> None:
    user = tier(tmp_path)
    fill(user, range(2))
    user.close()
    assert user.get_many([key_of(1)]) == {}
    assert not user.put(key_of(3), entry_of(3))
    assert key_of(1) not in user
    assert user.stats().entries == 0
    assert user.verify() == (0, 0)


def test_clear_and_writes_at_once(tmp_path: Path) -> None:
    """What is being written when the cache is cleared doesn't come back."""
    user = tier(tmp_path, 30 * SIZE)
    errors: list[BaseException] = []

    def write(begin: int) -> None:
        try:
            for number in range(begin, begin + 30):
                user.put(key_of(number), entry_of(number))
                found = user.get_many([key_of(number)])
                assert all(right(entry, number) for entry in found.values())
        except BaseException as error:  # noqa: BLE001 - a thread's error is the test's
            errors.append(error)

    threads = [threading.Thread(target=write, args=(100 * i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        user.clear()
    for thread in threads:
        thread.join()
    assert errors == []
    user.clear()
    assert names(tmp_path) == []
    assert user.stats().failed == 0
    assert tier(tmp_path, 30 * SIZE).stats().bytes == 0


def test_wrong_arguments(tmp_path: Path) -> None:
    with pytest.raises(InputError):
        tier(tmp_path, store="zip")
    with pytest.raises(InputError):
        tier(tmp_path, -1)
