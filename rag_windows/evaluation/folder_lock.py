"""One writer at a time for a run's folder."""

from __future__ import annotations

from pathlib import Path

from rag_windows.cache.files import LOCKS_WORK, Files
from rag_windows.cache.folders import closing
from rag_windows.cache.locks import Lock
from rag_windows.errors import DataError, InputError

LOCK = ".lock"


def lock_folder(path: Path) -> Lock:
    """Take the lock of a folder, which ends with the process; never waits.

    Where the system has no file locks, nothing is locked.

    Raises:
        InputError: another process holds it.
        DataError: the folder does not let itself be locked.
    """
    files = Files()
    if not LOCKS_WORK:
        return Lock(files, None)
    try:
        folder = files.open_root(str(path))
        with closing(files, folder):
            descriptor = files.open_lock(LOCK, folder, True)
        try:
            held = files.lock(descriptor)
        except BaseException:
            files.close(descriptor)
            raise
    except OSError as error:
        raise DataError(f"{path} can't be locked for writing: {error.strerror}.") from error
    if held:
        return Lock(files, descriptor)
    files.close(descriptor)
    raise InputError(
        f"Another process is writing {path}. Wait for it, or name another folder with --out."
    )
