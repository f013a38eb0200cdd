"""Row: kill -9 at 200 random moments and at each system call of a write.

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

from tests.rag_windows.cache.disk_cases import (
    FULL,
    CountingFiles,
    HalfFiles,
    QuickFiles,
    end_of,
    entry_of,
    entry_path,
    folder_bytes,
    in_child,
    key_of,
    names,
    right,
    tier,
)

OLD = range(3)
NEW = 100
MOMENTS = 200 if FULL else 16
LIMIT = 12_000


def killing(files_type: type[CountingFiles], at: int) -> CountingFiles:
    def on_call(number: int, name: str) -> None:
        if number == at:
            os.kill(os.getpid(), signal.SIGKILL)

    return files_type(on_call)


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


@pytest.mark.parametrize("files_type", [CountingFiles, HalfFiles])
def test_kill_at_each_system_call_of_a_write(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, files_type: type[CountingFiles]
) -> None:
    counting = files_type()
    filled(tmp_path / "count")
    writer = tier(tmp_path / "count", LIMIT, counting)
    opening = len(counting.calls)
    assert writer.put(key_of(NEW), entry_of(NEW))
    calls = counting.calls[:]
    steps = [name for name in calls[opening:] if name in ("open_new", "write", "flush", "rename")]
    assert [name for name in steps if name != "write"] == ["open_new", "flush", "rename", "flush"]
    assert steps[1:-3] == ["write"] * len(steps[1:-3])
    opened, writes = range(1, opening + 1), range(opening + 1, len(calls) + 1)
    every = [*opened, *writes]
    if not FULL:
        # Of opening the folder a few, of writing all; halved writes differ in the writes only.
        every = [*opened[::6], *writes] if files_type is CountingFiles else [*writes[10::4]]
    for at in every:
        folder = tmp_path / f"{files_type.__name__}-{at}"
        filled(folder)

        def work(folder: Path = folder, at: int = at) -> None:
            tier(folder, LIMIT, killing(files_type, at)).put(key_of(NEW), entry_of(NEW))

        assert end_of(in_child(work)) == -signal.SIGKILL
        there = entry_path(folder, NEW).exists()
        assert there == ("rename" in calls[: at - 1])
        check_after(folder, caplog, range(NEW + 1))


def test_kill_at_each_system_call_that_makes_room(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    full = range(40)

    def fill(folder: Path) -> None:
        before = tier(folder, LIMIT)
        for number in full:
            before.put(key_of(number), entry_of(number))

    counting = CountingFiles()
    fill(tmp_path / "count")
    writer = tier(tmp_path / "count", LIMIT, counting)
    opening = len(counting.calls)
    writer.get_many([key_of(NEW)] * 5)
    writer.put(key_of(NEW), entry_of(NEW))
    assert "remove" in counting.calls[opening:]
    every = len(counting.calls)
    for at in range(opening + 1, every + 1, 1 if FULL else 3):
        folder = tmp_path / str(at)
        fill(folder)

        def work(folder: Path = folder, at: int = at) -> None:
            dying = tier(folder, LIMIT, killing(CountingFiles, at))
            dying.get_many([key_of(NEW)] * 5)
            dying.put(key_of(NEW), entry_of(NEW))

        assert end_of(in_child(work)) == -signal.SIGKILL
        check_after(folder, caplog, range(NEW + 1))


def test_kill_at_random_moments(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "cache"
    draw = random.Random(5)

    def work() -> None:
        writer = tier(folder, LIMIT, QuickFiles())
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
