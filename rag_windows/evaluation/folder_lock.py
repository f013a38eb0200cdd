"""One writer at a time for a run's folder."""

from __future__ import annotations

from pathlib import Path

from rag_windows.cache.locks import LOCKS_WORK, FileLock, lock_file
from rag_windows.errors import DataError, InputError

LOCK = ".lock"


def lock_folder(path: Path) -> FileLock:
    """Take the lock of a folder, which ends with the process; never waits.

    Where the system has no file locks, nothing is locked.

    Raises:
        InputError: another process holds it.
        DataError: the folder does not let itself be locked.
    """
    if not LOCKS_WORK:
        return FileLock(None)
    try:
        lock = lock_file(path / LOCK)
    except OSError as error:
        raise DataError(f"{path} can't be locked for writing: {error.strerror}.") from error
    if lock is None:
        raise InputError(
            f"Another process is writing {path}. Wait for it, or name another folder with --out."
        )
    return lock
