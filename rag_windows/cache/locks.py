"""Locks that all processes on one folder respect, and that end with the process that holds them."""

from __future__ import annotations

import contextlib
import random
import threading
import time

from rag_windows.cache.files import Files
from rag_windows.cache.folders import Folders, closing

WRITES = "writes"
"""The lock around every change of what the folder holds; taken for moments only."""

_LONGEST_NAP_S = 0.004


class Lock:
    """A lock that is held until `release`, or, inert, none at all.

    Args:
        files: the system's calls.
        descriptor: the open lock file, locked; None makes an inert lock.
        leave: the open folder and the name to remove the file from at release; None to let it be.
    """

    def __init__(
        self, files: Files, descriptor: int | None, leave: tuple[Folders, str] | None = None
    ) -> None:
        self._files = files
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
            folders, name = self._leave
            with contextlib.suppress(OSError):
                self._files.remove(name, folders.locks)
        with contextlib.suppress(OSError):
            self._files.unlock(descriptor)
        with contextlib.suppress(OSError):
            self._files.close(descriptor)

    def __enter__(self) -> Lock:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()


def lock_writes(folders: Folders, wait_s: float) -> Lock | None:
    """Take the lock around changes; see `wait_for_lock`."""
    return wait_for_lock(folders.files, WRITES, folders.locks, wait_s)


def wait_for_lock(files: Files, name: str, folder: int, wait_s: float) -> Lock | None:
    """Take the lock of a file, made if it is missing; None if others held it for `wait_s` seconds.

    Raises:
        OSError: if the lock file can't be opened or locked.
    """
    descriptor = files.open_lock(name, folder, True)
    deadline = time.monotonic() + wait_s
    nap = 0.0002
    try:
        while not files.lock(descriptor):
            if time.monotonic() >= deadline:
                files.close(descriptor)
                return None
            time.sleep(nap * random.uniform(0.5, 1.5))
            nap = min(nap * 1.5, _LONGEST_NAP_S)
    except BaseException:
        with contextlib.suppress(OSError):
            files.close(descriptor)
        raise
    return Lock(files, descriptor)


def try_lock(folders: Folders, name: str) -> Lock | None:
    """Take the lock of a key; None if another living holder has it. Never waits.

    Raises:
        OSError: if the lock file can't be opened or locked.
    """
    files = folders.files
    while True:
        descriptor = files.open_lock(name, folders.locks, True)
        try:
            # Twice: somebody who only looked whether it is held may have had it for that moment.
            held = files.lock(descriptor) or files.lock(descriptor)
            if held and _is_current(folders, name, descriptor):
                return Lock(files, descriptor, (folders, name))
        except BaseException:
            with contextlib.suppress(OSError):
                files.close(descriptor)
            raise
        files.close(descriptor)
        if not held:
            return None


def is_locked(folders: Folders, name: str) -> bool:
    """Whether a living holder has the lock of a key.

    Raises:
        OSError: if the lock file can't be opened or locked.
    """
    files = folders.files
    try:
        descriptor = files.open_lock(name, folders.locks, False)
    except FileNotFoundError:
        return False
    with closing(files, descriptor):
        if not files.lock(descriptor):
            return True
        files.unlock(descriptor)
    return False


def drop_dead_locks(folders: Folders) -> None:
    """Remove lock files whose holders have died.

    Raises:
        OSError: if the folder can't be read.
    """
    for name in folders.files.names(folders.locks):
        if name == WRITES:
            continue
        with contextlib.suppress(OSError):  # what can't be opened or locked is no lock of ours
            lock = try_lock(folders, name)
            if lock is not None:
                lock.release()


def _is_current(folders: Folders, name: str, descriptor: int) -> bool:
    """Whether the name still stands for the file that was locked; its last holder removed it."""
    try:
        named = folders.files.state_of(name, folders.locks)
    except FileNotFoundError:
        return False
    return named.inode == folders.files.state(descriptor).inode
