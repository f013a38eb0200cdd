"""Changes to the folder, one process and one thread at a time."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence

from rag_windows.cache.catalog import Catalog
from rag_windows.cache.folders import Folders
from rag_windows.cache.format import Image
from rag_windows.cache.listing import list_entries
from rag_windows.cache.locks import Lock, lock_writes
from rag_windows.cache.quarantine import SHARE, put_aside
from rag_windows.cache.writing import fill, show
from rag_windows.forks import in_children

WAIT_S = 2.0
"""Longest wait for the changes of other processes; a write waits twice at most."""


class Changes:
    """Makes the changes, and keeps the catalog that goes with them.

    Args:
        limit_bytes: most bytes of all files.
        wait_s: longest wait for the changes of other processes; then it goes without its own.
    """

    def __init__(self, limit_bytes: int, wait_s: float = WAIT_S) -> None:
        self._wait_s = wait_s
        self._catalog = Catalog(limit_bytes)
        self._mutex = threading.Lock()
        in_children(self)

    def after_fork(self) -> None:
        """A child lists the folder before it writes there; the parent's files are not its own."""
        self._catalog = Catalog(self._catalog.limit_bytes)
        self._mutex = threading.Lock()

    @property
    def limit_bytes(self) -> int:
        """Most bytes of all files."""
        return self._catalog.limit_bytes

    @property
    def evictions(self) -> int:
        """Entries dropped to make room."""
        return self._catalog.evictions

    def touch(self, keys: Sequence[str]) -> None:
        """Count a request for each of the keys, held or not."""
        with self._mutex:
            for key in keys:
                self._catalog.policy.touch(key)

    def sync(self, folders: Folders) -> None:
        """List the folder, remove what dead writers left, drop what is too much.

        Raises:
            OSError: if the system can't.
        """
        with self._locked(folders) as lock:
            if lock is not None:
                self._catalog.sync(folders, lock)

    def write(
        self, folders: Folders, key: str, image: Image, cost_s: float, modified_ns: int
    ) -> bool:
        """Write a file; whole or not at all. False if it is refused, or the lock is not to be had.

        Raises:
            OSError: if the system can't; the entry isn't there then.
        """
        with self._locked(folders) as lock:
            if lock is None:
                return False
            reserved = self._catalog.reserve(folders, lock, key, image.nbytes, cost_s)
        if reserved is None:
            return False
        name, descriptor = reserved
        shown = done = False
        try:
            fill(folders.files, descriptor, image, modified_ns)
            with self._locked(folders) as lock:
                # Under the lock: who lists the folder must see the file under one of its names.
                if lock is not None:
                    show(folders, name, key)
                    self._catalog.written(key, name)
                    shown = True
            if shown:
                folders.files.flush(folders.entries)
                done = True
        except FileNotFoundError:
            return False  # taken away meanwhile, to make room or to clear the cache
        finally:
            with contextlib.suppress(OSError):
                folders.files.close(descriptor)
            if not done:
                self._undo(folders, key, name, shown)
        return done

    def drop(self, folders: Folders, keys: Sequence[str]) -> int:
        """Remove what is there under the keys; returns for how many something was.

        It is done without the lock, too, if that is not to be had: what shall go must go.

        Raises:
            OSError: if the system can't.
        """
        with self._locked(folders) as lock:
            return sum(self._catalog.drop(folders, lock, key) for key in keys)

    def put_aside(self, folders: Folders, key: str, inode: int | None) -> bool:
        """Put aside a file that can't be proved right; whether it was still there.

        Raises:
            OSError: if the system can't.
        """
        moved = put_aside(folders, key, inode)
        if moved:
            with self._locked(folders) as lock:
                self._catalog.forget(key)
                if lock is not None:
                    self._catalog.trim_aside(folders, lock, self.limit_bytes // SHARE, keep=1)
        return moved

    def clear(self, folders: Folders) -> None:
        """Remove all entries, those being written and the files put aside.

        Raises:
            OSError: if the system can't.
        """
        with self._locked(folders) as lock:
            for key in list_entries(folders):
                self._catalog.drop(folders, lock, key)
            self._catalog.policy.clear()
            if lock is not None:
                self._catalog.trim_aside(folders, lock, 0, keep=0)
                self._catalog.sync(folders, lock)

    def _undo(self, folders: Folders, key: str, name: str, shown: bool) -> None:
        with contextlib.suppress(OSError), self._locked(folders) as lock:
            if shown:
                self._catalog.drop(folders, lock, key)
            else:
                self._catalog.give_up(folders, lock, key, name)

    @contextlib.contextmanager
    def _locked(self, folders: Folders) -> Iterator[Lock | None]:
        """The lock of all processes, then this process's; the first is None if others kept it."""
        lock = lock_writes(folders, self._wait_s)
        try:
            with self._mutex:
                yield lock
        finally:
            if lock is not None:
                lock.release()
