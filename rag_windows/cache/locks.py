"""Locks of files, which end with the process that holds them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from filelock import FileLock, Timeout

from rag_windows.errors import CacheError

LOCKS_WORK = find_spec("fcntl") is not None
"""Whether the system has POSIX file locks; Windows has none."""


def require_locks() -> None:
    """Refuse to keep windows on disk where the system has no POSIX file locks."""
    if not LOCKS_WORK:
        raise CacheError(
            "Keeping windows on disk needs POSIX file locks (Python's fcntl), which this system "
            "does not have; keep them in memory instead: leave path= and disk= out."
        )


def lock_file(path: Path, wait_s: float = 0.0) -> Callable[[], None] | None:
    """Take the lock of a file, made if it is missing; None if another living holder kept it.

    Returns what gives it back and removes the file, from any thread; again it does nothing. An
    OSError says that the file can't be opened or locked, or is a link.
    """
    lock = FileLock(path, wait_s, 0o600, thread_local=False, poll_interval=0.005)
    try:
        lock.acquire()
    except Timeout:
        return None

    def release() -> None:
        if lock.is_locked:
            with contextlib.suppress(OSError):
                os.unlink(path)
            with contextlib.suppress(OSError):
                lock.release()

    return release
