"""Rows: kill -9 at random moments and at each call or statement; errors at each of them.

Must show: no wrong byte read later, no failure to open, temp files reclaimed, one warning, a key
visible only when its file is whole; what was noted for `invalidate` is never forgotten.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.rag_windows.cache.disk_cases import (
    FULL,
    STATEMENTS,
    System,
    end_of,
    entry_of,
    entry_path,
    filled,
    folder_bytes,
    held,
    in_child,
    key_of,
    killing,
    names,
    on,
    tier,
    warned,
)

NEW = 100
ALL = range(NEW + 1)
LIMIT = 12_000
Work = Callable[[Path], Any]


def store(folder: Path) -> Any:
    user = tier(folder, LIMIT)
    user.put(key_of(NEW), entry_of(NEW))
    return user


def make_room(folder: Path) -> Any:
    user = tier(folder, LIMIT)
    user.get_many([key_of(NEW)] * 5)
    user.put(key_of(NEW), entry_of(NEW))
    return user


def label(folder: Path) -> Any:
    user = tier(folder, LIMIT)
    user.add_labels(key_of(1), ["copy"])
    return user


def ask(folder: Path) -> Any:
    user = tier(folder, LIMIT)
    assert held(user, ALL) in ([1], [])
    return user


def maintain(folder: Path) -> Any:
    user = label(folder)
    user.get_many([key_of(1)])
    user.labels([key_of(1)])
    release = user.try_lock(key_of(1))
    if release is not None:
        release()
    user.verify()
    user.prune(0.0)
    user.keys_with(["document"])
    user.stats()
    assert (key_of(NEW) in user) is False
    user.remove([key_of(NEW)])
    user.clear()
    return user


def calls_of(work: Work, folder: Path, at_most: int | None = None) -> tuple[list[str], int]:
    """What it calls, and how much of that opens the folder."""
    with on(System(at_most=at_most)) as counting:
        tier(folder, LIMIT)
    opening = len(counting.calls)
    with on(System(at_most=at_most)) as counting:
        work(folder)
    return counting.calls, opening


def check_after(folder: Path, numbers: range = ALL) -> None:
    """The folder opens, holds right entries only, and takes new ones up to its limit."""
    after = tier(folder, LIMIT)
    there = held(after, numbers)
    assert after.stats().quarantined == 0, "a file was visible before it was whole"
    assert all(name.endswith(".safetensors") for name in names(folder))
    after.remove(map(key_of, there))
    for number in range(200, 210):
        if after.put(key_of(number), entry_of(number)):
            assert held(after, range(number, number + 1))
    assert folder_bytes(folder) <= LIMIT
    assert after.stats().stored >= 5
    assert after.stats().entries == len(names(folder))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("work", "before", "at_most"),
    [(store, 3, None), (store, 3, 333), (make_room, 40, None), (label, 3, None)],
)
def test_kill_at_each_call(
    tmp_path: Path, work: Work, before: int, at_most: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    filled(tmp_path / "count", range(before), LIMIT)
    calls, opening = calls_of(work, tmp_path / "count", at_most)
    if work is store:
        steps = [one for one in calls[opening:] if one in ("open_new", "write", "fsync", "rename")]
        assert [one for one in steps if one != "write"] == ["open_new", "fsync", "rename", "fsync"]
        assert steps[1:-3] == ["write"] * len(steps[1:-3])
    every = range(1 if work is store else opening + 1, len(calls) + 1)
    for at in every if FULL else every[:: 3 if at_most is None else 6]:
        folder = tmp_path / f"{at_most}-{at}"
        filled(folder, range(before), LIMIT)

        def killed(folder: Path = folder, at: int = at) -> None:
            with on(killing(at, at_most)):
                work(folder)

        assert end_of(in_child(killed)) == -signal.SIGKILL
        caplog.clear()
        if work is store:
            assert entry_path(folder, NEW).exists() == ("rename" in calls[: at - 1])
        if "chmod" in calls[: at - 1] and not tier(folder, LIMIT).keys_with(["copy"]):
            # Who is told to forget an id that was noted forgets the entry.
            (folder / "catalog" / "windows.sqlite").unlink()
            assert held(tier(folder, LIMIT), range(1, 2)) == []
        check_after(folder)
        assert warned(caplog) == 0


@pytest.mark.slow
def test_kill_at_random_moments(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    draw = random.Random(5)

    def work() -> None:
        writer = tier(folder, LIMIT)
        number = draw.randrange(100)
        while True:
            number = (number + 1) % 100
            writer.put(key_of(number), entry_of(number))
            writer.get_many([key_of(draw.randrange(100))])

    for _ in range(200 if FULL else 16):
        draw.random()
        child = in_child(work)
        time.sleep(draw.uniform(0.002, 0.06))
        os.kill(child, signal.SIGKILL)
        assert end_of(child) == -signal.SIGKILL
        after = tier(folder, LIMIT)
        held(after, range(100))
        assert after.stats().quarantined == 0
        assert all(name.endswith(".safetensors") for name in names(folder))
        assert folder_bytes(folder) <= LIMIT
    check_after(folder)


ERRORS = {
    errno.ENOSPC: sqlite3.SQLITE_FULL,
    errno.EIO: sqlite3.SQLITE_IOERR,
    errno.EROFS: sqlite3.SQLITE_READONLY,
    errno.EACCES: sqlite3.SQLITE_PERM,
    errno.EMFILE: sqlite3.SQLITE_CANTOPEN,
}
"""The system's errors, and what SQLite calls them."""


def fail(name: str, number: int) -> None:
    if name not in STATEMENTS:
        raise OSError(number, os.strerror(number))
    error = sqlite3.OperationalError(os.strerror(number))
    error.sqlite_errorcode = ERRORS[number]
    raise error


@pytest.mark.slow
@pytest.mark.parametrize("turn", range(len(ERRORS) if FULL else 1))
@pytest.mark.parametrize("forever", [False, True], ids=["once", "from then on"])
@pytest.mark.parametrize("work", [store, ask, maintain])
def test_nth_call_fails(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, turn: int, forever: bool, work: Work
) -> None:
    filled(tmp_path / "count", range(1, 2))
    calls, _ = calls_of(work, tmp_path / "count")
    for at in range(1, len(calls) + 1, 1 if FULL or work is store else 3):
        number = list(ERRORS)[(at + turn) % len(ERRORS)]

        went: list[str] = []

        def on_call(
            count: int, name: str, at: int = at, number: int = number, went: list[str] = went
        ) -> None:
            if count == at or (forever and count > at):
                fail(name, number)
            went.append(name)

        folder = tmp_path / str(at)
        filled(folder, range(1, 2))
        caplog.clear()
        with on(System(on_call)):
            user = work(folder)
        assert warned(caplog) <= 1
        if work is store:
            done, there = user.stats().stored == 1, entry_path(folder, NEW).exists()
            # On a disk that does nothing any more nothing can be taken back; it is whole.
            renamed = went.count("rename") == calls.count("rename")
            assert there == (done or (forever and renamed))
            if not there:
                assert warned(caplog) == 1
            elif done and not forever and calls[at - 1] != "close":
                assert at <= calls.index("open_new")
        # Once the disk is well again everything is.
        after = tier(folder)
        held(after, ALL)
        assert after.put(key_of(NEW), entry_of(NEW))
        assert NEW in held(after, ALL)
        assert not list((folder / "entries").glob("*.tmp"))
        user.close()


def test_the_tier_comes_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with on(System(lambda count, name: fail(name, errno.EROFS))):
        user = filled(tmp_path / "cache", range(3))
        assert held(user, range(3)) == []
    assert warned(caplog) == 1
    assert user.stats().failed == 6
    assert user.put(key_of(NEW), entry_of(NEW))
    assert held(user, ALL) == [NEW]
    assert warned(caplog) == 1


@pytest.mark.parametrize("with_catalog", [True, False])
def test_a_read_only_folder_is_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, with_catalog: bool
) -> None:
    """A cache that was made elsewhere and is mounted read-only gives its entries."""
    filled(tmp_path, range(1, 2))
    if not with_catalog:
        shutil.rmtree(tmp_path / "catalog")
    writing = {"open_new", "chmod", "rename", "unlink", "mkdir", *STATEMENTS}

    def on_call(count: int, name: str) -> None:
        if name in writing:
            fail(name, errno.EROFS)

    with on(System(on_call)):
        user = tier(tmp_path)
        assert held(user, ALL) == [1]
        assert not user.put(key_of(NEW), entry_of(NEW))
        assert user.keys_with(["document"]) == [key_of(1)]
        release = user.try_lock(key_of(NEW))
        assert release is not None
        release()
    assert warned(caplog) == 1


def test_folder_removed_while_open(tmp_path: Path) -> None:
    user = filled(tmp_path / "cache", range(3))
    shutil.rmtree(tmp_path / "cache")
    assert held(user, ALL) == []
    assert user.put(key_of(NEW), entry_of(NEW))
    assert held(user, ALL) == [NEW]
