"""Row: ENOSPC, EIO, EROFS, EACCES at the nth call or statement, for every n.

Must show: identical answer (a hit is right, or it is a miss), one warning, key never visible.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from rag_windows.cache.disk import DiskTier
from tests.rag_windows.cache.disk_cases import (
    FULL,
    System,
    entry_of,
    entry_path,
    key_of,
    on,
    right,
    tier,
)

OLD, NEW = 1, 2
ERRORS = {
    errno.ENOSPC: sqlite3.SQLITE_FULL,
    errno.EIO: sqlite3.SQLITE_IOERR,
    errno.EROFS: sqlite3.SQLITE_READONLY,
    errno.EACCES: sqlite3.SQLITE_PERM,
    errno.EMFILE: sqlite3.SQLITE_CANTOPEN,
}
"""The system's errors, and what SQLite calls them."""

QUIET = {"close", "flock"}
"""Calls whose failing changes nothing that was read or written."""

STATEMENTS = {"connect", "execute", "executemany", "executescript"}


def fail(name: str, number: int) -> None:
    if name not in STATEMENTS:
        raise OSError(number, os.strerror(number))
    error = sqlite3.OperationalError(os.strerror(number))
    error.sqlite_errorcode = ERRORS[number]
    raise error


def failing(at: int, number: int, forever: bool) -> System:
    def on_call(count: int, name: str) -> None:
        if count == at or (forever and count > at):
            fail(name, number)

    return System(on_call)


def warned(caplog: pytest.LogCaptureFixture) -> int:
    return len([r for r in caplog.records if r.levelno >= logging.WARNING])


def store(folder: Path) -> tuple[DiskTier, bool]:
    writer = tier(folder)
    return writer, writer.put(key_of(NEW), entry_of(NEW))


def ask(folder: Path) -> tuple[DiskTier, bool]:
    reader = tier(folder)
    found = reader.get_many([key_of(OLD), key_of(NEW)])
    assert key_of(NEW) not in found
    assert all(right(entry, OLD) for entry in found.values())
    return reader, bool(found)


def maintain(folder: Path) -> tuple[DiskTier, bool]:
    user = tier(folder)
    user.get_many([key_of(OLD)])
    user.write_uses()
    user.add_labels(key_of(OLD), ["another"])
    user.labels([key_of(OLD)])
    lock = user.try_lock(key_of(OLD))
    if lock is not None:
        lock.release()
    user.verify()
    user.prune(0.0)
    user.keys_with(["document"])
    user.stats()
    assert (key_of(NEW) in user) is False
    user.remove([key_of(NEW)])
    user.clear()
    return user, True


@pytest.mark.parametrize("turn", range(len(ERRORS) if FULL else 1))
@pytest.mark.parametrize("forever", [False, True], ids=["once", "from then on"])
@pytest.mark.parametrize("work", [store, ask, maintain])
def test_nth_call_fails(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    turn: int,
    forever: bool,
    work: Callable[[Path], tuple[DiskTier, bool]],
) -> None:
    assert tier(tmp_path / "count").put(key_of(OLD), entry_of(OLD))
    with on(System()) as counting:
        work(tmp_path / "count")
    calls = counting.calls
    for at in range(1, len(calls) + 1, 1 if FULL or work is store else 3):
        number = list(ERRORS)[(at + turn) % len(ERRORS)]
        folder = tmp_path / str(at)
        assert tier(folder).put(key_of(OLD), entry_of(OLD))
        caplog.clear()
        with on(failing(at, number, forever)):
            user, done = work(folder)
        assert warned(caplog) <= 1
        if work is store:
            check_stored(folder, calls[at - 1], at, forever, done, calls, warned(caplog))
        # Once the disk is well again everything is.
        after = tier(folder)
        found = after.get_many([key_of(OLD), key_of(NEW)])
        assert all(right(entry, n) for n in (OLD, NEW) if (entry := found.get(key_of(n))))
        assert after.put(key_of(NEW), entry_of(NEW))
        assert right(after.get_many([key_of(NEW)])[key_of(NEW)], NEW)
        assert not list((folder / "entries").glob("*.tmp"))
        user.close()


def check_stored(
    folder: Path, name: str, at: int, forever: bool, done: bool, calls: list[str], warnings: int
) -> None:
    renamed = len(calls) - calls[::-1].index("rename")
    there = entry_path(folder, NEW).exists()
    if forever and at > renamed:
        # Nothing can be taken back on a disk that does nothing any more; what is there is whole.
        assert there
        return
    assert there == done
    if not done:
        assert warnings == 1
    elif not forever and name not in QUIET:
        assert at <= calls.index("open_new")


def test_the_tier_comes_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with on(System(lambda count, name: fail(name, errno.EROFS))):
        user = tier(tmp_path / "cache")
        for number in range(3):
            assert not user.put(key_of(number), entry_of(number))
            assert user.get_many([key_of(number)]) == {}
    assert warned(caplog) == 1
    assert user.stats().failed == 6
    assert user.put(key_of(NEW), entry_of(NEW))
    assert right(user.get_many([key_of(NEW)])[key_of(NEW)], NEW)
    assert warned(caplog) == 1


@pytest.mark.parametrize("with_catalog", [True, False])
def test_a_read_only_folder_is_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, with_catalog: bool
) -> None:
    """A cache that was made elsewhere and is mounted read-only gives its entries."""
    assert tier(tmp_path).put(key_of(OLD), entry_of(OLD))
    if not with_catalog:
        shutil.rmtree(tmp_path / "catalog")
    writing = {"open_new", "flock", "chmod", "rename", "unlink", "mkdir", "fchmod"}

    def on_call(count: int, name: str) -> None:
        if name in writing or name in STATEMENTS:
            fail(name, errno.EROFS)

    with on(System(on_call)):
        user = tier(tmp_path)
        assert right(user.get_many([key_of(OLD)])[key_of(OLD)], OLD)
        assert not user.put(key_of(NEW), entry_of(NEW))
        assert user.keys_with(["document"]) == [key_of(OLD)]
        lock = user.try_lock(key_of(NEW))
        assert lock is not None
        lock.release()
    assert warned(caplog) == 1


def test_folder_removed_while_open(tmp_path: Path) -> None:
    user = tier(tmp_path / "cache")
    assert user.put(key_of(OLD), entry_of(OLD))
    shutil.rmtree(tmp_path / "cache")
    assert user.get_many([key_of(OLD)]) == {}
    assert user.put(key_of(NEW), entry_of(NEW))
    assert right(user.get_many([key_of(NEW)])[key_of(NEW)], NEW)
