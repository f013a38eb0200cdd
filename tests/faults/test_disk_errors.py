"""Row: ENOSPC, EIO, EROFS, EACCES at the nth call, for every n.

Must show: identical answer (a hit is right, or it is a miss), one warning, key never visible.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from rag_windows.cache.disk import DiskTier
from tests.rag_windows.cache.disk_cases import (
    FULL,
    CountingFiles,
    entry_of,
    entry_path,
    key_of,
    right,
    tier,
)

OLD, NEW = 1, 2
ERRORS = [errno.ENOSPC, errno.EIO, errno.EROFS, errno.EACCES, errno.EMFILE]
QUIET = {"close", "unlock"}
"""Calls whose failing changes nothing that was read or written."""


def failing(at: int, number: int, forever: bool) -> CountingFiles:
    def on_call(count: int, name: str) -> None:
        if count == at or (forever and count > at):
            raise OSError(number, os.strerror(number))

    return CountingFiles(on_call)


def warned(caplog: pytest.LogCaptureFixture) -> int:
    return len([r for r in caplog.records if r.levelno >= logging.WARNING])


def store(folder: Path, files: CountingFiles) -> tuple[DiskTier, bool]:
    writer = tier(folder, files=files)
    return writer, writer.put(key_of(NEW), entry_of(NEW))


def ask(folder: Path, files: CountingFiles) -> tuple[DiskTier, bool]:
    reader = tier(folder, files=files)
    found = reader.get_many([key_of(OLD), key_of(NEW)])
    assert key_of(NEW) not in found
    assert all(right(entry, OLD) for entry in found.values())
    return reader, bool(found)


def maintain(folder: Path, files: CountingFiles) -> tuple[DiskTier, bool]:
    user = tier(folder, files=files)
    lock = user.try_lock(key_of(OLD))
    user.locked(key_of(OLD))
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
    work: Callable[[Path, CountingFiles], tuple[DiskTier, bool]],
) -> None:
    counting = CountingFiles()
    assert tier(tmp_path / "count").put(key_of(OLD), entry_of(OLD))
    work(tmp_path / "count", counting)
    calls = counting.calls
    for at in range(1, len(calls) + 1):
        number = ERRORS[(at + turn) % len(ERRORS)]
        folder = tmp_path / str(at)
        assert tier(folder).put(key_of(OLD), entry_of(OLD))
        caplog.clear()
        user, done = work(folder, failing(at, number, forever))
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
    elif not forever:
        assert name in QUIET or at <= calls.index("open_new")


def test_the_tier_comes_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    broken = True

    def on_call(count: int, name: str) -> None:
        if broken:
            raise OSError(errno.EROFS, "read-only")

    user = tier(tmp_path / "cache", files=CountingFiles(on_call))
    for number in range(3):
        assert not user.put(key_of(number), entry_of(number))
        assert user.get_many([key_of(number)]) == {}
    assert warned(caplog) == 1
    assert user.stats().failed == 3
    broken = False
    assert user.put(key_of(NEW), entry_of(NEW))
    assert right(user.get_many([key_of(NEW)])[key_of(NEW)], NEW)
    assert warned(caplog) == 1


def test_a_read_only_folder_is_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A cache that was made elsewhere and is mounted read-only gives its entries."""
    assert tier(tmp_path).put(key_of(OLD), entry_of(OLD))
    writing = {
        "open_new",
        "open_lock",
        "set_modified",
        "rename",
        "remove",
        "make_folder",
        "restrict",
    }

    def on_call(count: int, name: str) -> None:
        if name in writing:
            raise OSError(errno.EROFS, "read-only")

    user = tier(tmp_path, files=CountingFiles(on_call))
    assert right(user.get_many([key_of(OLD)])[key_of(OLD)], OLD)
    assert not user.put(key_of(NEW), entry_of(NEW))
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
