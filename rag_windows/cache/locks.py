"""Locks of files, which end with the process that holds them."""

from __future__ import annotations

import contextlib
import os
import random
import time
from pathlib import Path

from rag_windows.errors import CacheError

try:
    import fcntl
except ImportError:  # Windows
    LOCKS_WORK = False
else:
    LOCKS_WORK = True


def require_locks() -> None:
    """Refuse to keep windows on disk where the system has no POSIX file locks."""
    if not LOCKS_WORK:
        raise CacheError(
            "Keeping windows on disk needs POSIX file locks (Python's fcntl), which this system "
            "does not have; keep them in memory instead: leave path= and disk= out."
        )


class FileLock:
    """A lock that is held until `release`, by any thread; its file goes with it.

    Without a file it locks nothing.
    """

    def __init__(self, path: Path | None = None, descriptor: int = -1) -> None:
        self._path, self.descriptor = path, descriptor

    def release(self) -> None:
        """Give it back; again does nothing."""
        path, self._path = self._path, None
        if path is not None:
            with contextlib.suppress(OSError):
                os.unlink(path)
            with contextlib.suppress(OSError):
                fcntl.flock(self.descriptor, fcntl.LOCK_UN)  # also for children forked meanwhile
            with contextlib.suppress(OSError):
                os.close(self.descriptor)

    def __enter__(self) -> FileLock:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()


def lock_file(path: Path, wait_s: float = 0.0) -> FileLock | None:
    """Take the lock of a file, made if it is missing; None if another living holder kept it.

    Raises:
        OSError: the file can't be opened or locked, or is a link.
    """
    deadline = time.monotonic() + wait_s
    flags = os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW
    while True:
        with contextlib.ExitStack() as stack:
            descriptor = os.open(path, flags, 0o600)
            stack.callback(os.close, descriptor)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                named = os.stat(path, follow_symlinks=False)
                if named.st_ino == os.fstat(descriptor).st_ino:
                    stack.pop_all()
                    return FileLock(path, descriptor)
            except FileNotFoundError:
                continue  # as if it had another name by now: its last holder removed it
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    return None
        time.sleep(random.uniform(0.0005, 0.004))
