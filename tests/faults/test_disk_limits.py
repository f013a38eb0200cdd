"""Row: size under the cap (files found at start count); usage and time limits over restarts."""

from __future__ import annotations

import dataclasses
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.rag_windows.cache.disk_cases import (
    entry_of,
    entry_path,
    filled,
    folder_bytes,
    held,
    key_of,
    names,
    tier,
)

SIZE = 1200
"""More than a file of `entry_of` takes, and less than two."""


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


def test_files_found_at_the_start_or_left_by_others_count(tmp_path: Path) -> None:
    filled(tmp_path, range(20))
    user = tier(tmp_path, 5 * SIZE)
    assert 0 < folder_bytes(tmp_path) <= 5 * SIZE
    assert user.stats().evictions == 20 - len(names(tmp_path))
    filled(tmp_path, range(20))
    user.prune(0.0)
    assert 0 < folder_bytes(tmp_path) <= 5 * SIZE


def test_too_large_is_refused(tmp_path: Path) -> None:
    user = tier(tmp_path, SIZE)
    assert not user.put(key_of(1), entry_of(1, tokens=500))
    assert user.stats().refused == 1
    assert names(tmp_path) == []
    assert not tier(tmp_path / "none", 0).put(key_of(1), entry_of(1))


def test_what_is_used_or_costs_much_survives_a_restart(tmp_path: Path) -> None:
    """Frequency counts, not only who was last."""
    user = filled(tmp_path, range(10))
    assert user.put(key_of(3), dataclasses.replace(entry_of(3), cost_s=30.0))
    for _ in range(20):
        user.get_many([key_of(0), key_of(5)])
    user.get_many([key_of(9)])
    user.labels([])  # uses are written with any change
    assert {0, 3, 5} <= {*held(tier(tmp_path, 4 * SIZE), range(10))}


def test_put_again_replaces(tmp_path: Path) -> None:
    user = tier(tmp_path, 3 * SIZE)
    for labels in (("document",), ("other",), ("document", "other")):
        assert user.put(key_of(2), dataclasses.replace(entry_of(2), labels=labels))
        assert user.get_many([key_of(2)])[key_of(2)].labels == labels
    assert user.keys_with({"other"}) == [key_of(2)]
    assert folder_bytes(tmp_path) == user.stats().bytes <= SIZE
    # What it took before is free again.
    assert all(user.put(key_of(number), entry_of(number)) for number in (4, 6))
    assert user.stats().entries == 3


def test_expired_entries_are_misses_and_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1_000_000.0
    monkeypatch.setattr(time, "time", lambda: now)
    user = tier(tmp_path)
    for number, until in ((1, now + 10), (2, now + 20), (3, None)):
        assert user.put(key_of(number), dataclasses.replace(entry_of(number), expires=until))
    assert held(user, range(4)) == [1, 2, 3]
    now += 10
    assert held(user, range(4)) == [2, 3]
    assert not entry_path(tmp_path, 1).exists()
    assert [user.prune(now), user.prune(now + 10)] == [0, 1]
    assert names(tmp_path) == [entry_path(tmp_path, 3).name]
    assert user.stats().expired == 2
    assert user.stats().quarantined == 0


def test_labels(tmp_path: Path) -> None:
    user = filled(tmp_path, range(4))
    strange = dataclasses.replace(entry_of(5), labels=('"\\\n', "ü" * 9000))
    assert user.put(key_of(5), strange)
    assert user.get_many([key_of(5)])[key_of(5)].labels == strange.labels
    assert user.keys_with(["ü" * 9000]) == [key_of(5)]
    assert user.keys_with([]) == []
    endless = dataclasses.replace(entry_of(6), labels=tuple("x" * 1000 for _ in range(2000)))
    assert not user.put(key_of(6), endless)


def test_remove_clear_and_close(tmp_path: Path) -> None:
    user = filled(tmp_path, range(6))
    assert user.remove([key_of(1), key_of(2), key_of(99)]) == 2
    assert (user.stats().removed, user.stats().entries) == (2, 4)
    user.clear()
    assert names(tmp_path) == []
    assert user.put(key_of(1), entry_of(1))
    assert held(user, range(2)) == [1]
    user.close()
    assert held(user, range(2)) == []
    assert not user.put(key_of(3), entry_of(3))
    assert key_of(1) not in user
    assert user.stats().entries == 0
    assert user.verify() == (0, 0)


def test_clear_and_writes_at_once(tmp_path: Path) -> None:
    """What is being written when the cache is cleared doesn't come back."""
    user = tier(tmp_path, 30 * SIZE)

    def write(begin: int) -> None:
        for number in range(begin, begin + 30):
            user.put(key_of(number), entry_of(number))
            held(user, range(number, number + 1))

    with ThreadPoolExecutor(4) as threads:
        writing = [threads.submit(write, 100 * i) for i in range(4)]
        while not all(one.done() for one in writing):
            user.clear()
    assert [one.exception() for one in writing] == [None] * 4
    user.clear()
    assert names(tmp_path) == []
    assert user.stats().failed == 0
    assert tier(tmp_path, 30 * SIZE).stats().bytes == 0
