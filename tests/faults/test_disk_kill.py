"""Row: kill -9 at 200 random moments and at each system call and statement of a write.

Must show: no wrong byte read later, no failure to open, temp files reclaimed.
"""

from __future__ import annotations

import logging
import os
import random
import signal
import time
from pathlib import Path

import pytest

from rag_windows.cache.disk import DiskTier
from tests.rag_windows.cache.disk_cases import (
    FULL,
    System,
    end_of,
    entry_of,
    entry_path,
    folder_bytes,
    in_child,
    key_of,
    names,
    on,
    right,
    tier,
)

OLD = range(3)
NEW = 100
MOMENTS = 200 if FULL else 16
LIMIT = 12_000


def killing(at: int, at_most: int | None = None) -> System:
    def on_call(number: int, name: str) -> None:
        if number == at:
            os.kill(os.getpid(), signal.SIGKILL)

    return System(on_call, at_most)


def filled(folder: Path) -> None:
    before = tier(folder, LIMIT)
    assert all(before.put(key_of(number), entry_of(number)) for number in OLD)


def check_after(folder: Path, caplog: pytest.LogCaptureFixture, numbers: range) -> None:
    """The folder opens, holds right entries only, and takes new ones up to its limit."""
    caplog.clear()
    after = tier(folder, LIMIT)
    found = after.get_many([key_of(number) for number in numbers])
    assert all(right(found[key_of(n)], n) for n in numbers if key_of(n) in found)
    assert after.stats().quarantined == 0, "a file was visible before it was whole"
    assert all(name.endswith(".safetensors") for name in names(folder))
    after.remove(found)
    for number in range(200, 210):
        if after.put(key_of(number), entry_of(number)):
            assert right(after.get_many([key_of(number)])[key_of(number)], number)
    assert folder_bytes(folder) <= LIMIT
    assert after.stats().stored >= 5
    assert after.stats().entries == len(names(folder))
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


@pytest.mark.parametrize("at_most", [None, 333])
def test_kill_at_each_call_of_a_write(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, at_most: int | None
) -> None:
    filled(tmp_path / "count")
    with on(System(at_most=at_most)) as counting:
        writer = tier(tmp_path / "count", LIMIT)
        opening = len(counting.calls)
        assert writer.put(key_of(NEW), entry_of(NEW))
    calls = counting.calls[:]
    steps = [name for name in calls[opening:] if name in ("open_new", "write", "fsync", "rename")]
    assert [name for name in steps if name != "write"] == ["open_new", "fsync", "rename", "fsync"]
    assert steps[1:-3] == ["write"] * len(steps[1:-3])
    opened, writes = range(1, opening + 1), range(opening + 1, len(calls) + 1)
    every = [*opened, *writes]
    if not FULL:
        # Of opening the folder a few, of writing all; shorter writes differ in the writes only.
        every = [*opened[::9], *writes[::2]] if at_most is None else [*writes[10::6]]
    for at in every:
        folder = tmp_path / f"{at_most}-{at}"
        filled(folder)

        def work(folder: Path = folder, at: int = at) -> None:
            with on(killing(at, at_most)):
                tier(folder, LIMIT).put(key_of(NEW), entry_of(NEW))

        assert end_of(in_child(work)) == -signal.SIGKILL
        there = entry_path(folder, NEW).exists()
        assert there == ("rename" in calls[: at - 1])
        check_after(folder, caplog, range(NEW + 1))


def test_kill_at_each_call_that_makes_room(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    full = range(40)

    def fill(folder: Path) -> None:
        before = tier(folder, LIMIT)
        for number in full:
            before.put(key_of(number), entry_of(number))

    def work(folder: Path) -> DiskTier:
        user = tier(folder, LIMIT)
        user.get_many([key_of(NEW)] * 5)
        user.put(key_of(NEW), entry_of(NEW))
        return user

    fill(tmp_path / "count")
    with on(System()) as counting:
        tier(tmp_path / "count", LIMIT)
        opening = len(counting.calls)
        counting.calls.clear()
        work(tmp_path / "count")
    assert "unlink" in counting.calls[opening:]
    for at in range(opening + 1, len(counting.calls) + 1, 1 if FULL else 4):
        folder = tmp_path / str(at)
        fill(folder)

        def killed(folder: Path = folder, at: int = at) -> None:
            with on(killing(at)):
                work(folder)

        assert end_of(in_child(killed)) == -signal.SIGKILL
        check_after(folder, caplog, range(NEW + 1))


def test_kill_at_random_moments(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "cache"
    draw = random.Random(5)

    def work() -> None:
        writer = tier(folder, LIMIT)
        number = draw.randrange(100)
        while True:
            number = (number + 1) % 100
            writer.put(key_of(number), entry_of(number))
            writer.get_many([key_of(draw.randrange(100))])

    for _ in range(MOMENTS):
        draw.random()
        child = in_child(work)
        time.sleep(draw.uniform(0.002, 0.06))
        os.kill(child, signal.SIGKILL)
        assert end_of(child) == -signal.SIGKILL
        after = tier(folder, LIMIT)
        found = after.get_many([key_of(number) for number in range(100)])
        assert all(right(found[key_of(n)], n) for n in range(100) if key_of(n) in found)
        assert after.stats().quarantined == 0
        assert all(name.endswith(".safetensors") for name in names(folder))
        assert folder_bytes(folder) <= LIMIT
    check_after(folder, caplog, range(100))
