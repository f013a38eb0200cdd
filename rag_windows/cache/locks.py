"""Locks of files, which end with the process that holds them."""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time

from rag_windows.errors import CacheError

try:
    import fcntl
except ImportError:  # Windows
    LOCKS_WORK = False
else:
    LOCKS_WORK = True

_LONGEST_NAP_S = 0.004


def require_locks() -> None:
    """Refuse to keep windows on disk where the system has no POSIX file locks.

    Raises:
        CacheError: saying so, and what works instead.
    """
    if not LOCKS_WORK:
        raise CacheError(
            "Keeping windows on disk needs POSIX file locks (Python's fcntl), which this system "
            "does not have; keep them in memory instead: leave path= and disk= out."
        )


class FileLock:
    """A lock that is held until `release`.

    Args:
        descriptor: the open lock file, locked; None makes a lock that locks nothing.
        leave: name and open folder of a lock file that goes with its lock; None lets it be.
    """

    def __init__(self, descriptor: int | None, leave: tuple[str, int] | None = None) -> None:
        self._descriptor = descriptor
        self._leave = leave
        self._once = threading.Lock()

    @property
    def descriptor(self) -> int:
        """The open lock file."""
        if self._descriptor is None:
            raise ValueError("the lock is not held.")
        return self._descriptor

    def release(self) -> None:
        """Give it back; again does nothing. Any thread may."""
        with self._once:
            descriptor, self._descriptor = self._descriptor, None
        if descriptor is None:
            return
        if self._leave is not None:
            with contextlib.suppress(OSError):
                os.unlink(self._leave[0], dir_fd=self._leave[1])
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # also for children forked while it was held
        with contextlib.suppress(OSError):
            os.close(descriptor)

    def __enter__(self) -> FileLock:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()


def lock_file(
    name: str | os.PathLike[str],
    folder: int | None = None,
    *,
    wait_s: float = 0.0,
    transient: bool = False,
) -> FileLock | None:
    """Take the lock of a file, made if it is missing; None if another living holder kept it.

    Args:
        name: of the file, in the open folder if there is one; a link is refused.
        folder: descriptor.
        wait_s: longest wait for other holders.
        transient: the file goes when the lock is released.

    Raises:
        OSError: if the file can't be opened or locked.
    """
    deadline = time.monotonic() + wait_s
    nap = 0.0002
    while True:
        descriptor = _open(name, folder, os.O_CREAT)
        current = True
        try:
            # Twice: somebody who only looked whether it is held may have had it for that moment.
            held = flock(descriptor) or flock(descriptor)
            if held and transient:
                current = _is_current(name, folder, descriptor)
            if held and current:
                leave = (os.fspath(name), folder) if transient and folder is not None else None
                return FileLock(descriptor, leave)
        except BaseException:
            with contextlib.suppress(OSError):
                os.close(descriptor)
            raise
        os.close(descriptor)
        if not held:
            if time.monotonic() >= deadline:
                return None
            time.sleep(nap * random.uniform(0.5, 1.5))
            nap = min(nap * 1.5, _LONGEST_NAP_S)


def is_locked(name: str, folder: int) -> bool:
    """Whether a living holder has the lock of a file.

    Raises:
        OSError: if the file can't be opened or locked.
    """
    try:
        descriptor = _open(name, folder)
    except FileNotFoundError:
        return False
    try:
        if not flock(descriptor):
            return True
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    finally:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    return False


def flock(descriptor: int) -> bool:
    """Take the exclusive lock of an open file; False if somebody holds it. Never waits."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _open(name: str | os.PathLike[str], folder: int | None, more: int = 0) -> int:
    flags = os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW | more
    return os.open(name, flags, 0o600, dir_fd=folder)


def _is_current(name: str | os.PathLike[str], folder: int | None, descriptor: int) -> bool:
    """Whether the name still stands for the file that was locked; its last holder removed it."""
    try:
        named = os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return named.st_ino == os.fstat(descriptor).st_ino
