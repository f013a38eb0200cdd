"""The folders of the disk tier, held open so that no path is walked twice."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass

from rag_windows.cache.files import Files
from rag_windows.errors import CacheError

ENTRIES, LOCKS, QUARANTINE = "entries", "locks", "quarantine"
_OWN = (ENTRIES, LOCKS, QUARANTINE)


@dataclass(eq=False, slots=True)
class Folders:
    """Descriptors of the folders; closed when nobody holds this object any more.

    They are never closed earlier: another thread could still use the number, and the system could
    have given it to another folder by then.

    Attributes:
        files: the system's calls.
        entries: descriptor of the folder of entries and of files being written.
        locks: descriptor of the folder of locks.
        quarantine: descriptor of the folder of files put aside.
    """

    files: Files
    entries: int
    locks: int
    quarantine: int

    def __del__(self) -> None:
        for descriptor in (self.entries, self.locks, self.quarantine):
            with contextlib.suppress(OSError):
                self.files.close(descriptor)


def open_folders(files: Files, path: str) -> Folders:
    """Open a cache's folders, made where they are missing, for this user only.

    Raises:
        CacheError: if `path` is no folder, or a folder in it is open to other users' writing.
        OSError: if the system can't.
    """
    with contextlib.suppress(FileExistsError):
        files.make_root(path)
    try:
        root = files.open_root(path)
    except NotADirectoryError as error:
        raise CacheError(f"the cache's path {path!r} is not a folder; name another one.") from error
    opened: list[int] = []
    try:
        if set(files.names(root)) <= set(_OWN):
            _restrict(files, root)  # a folder that holds other things, too, is left as it is
        for name in _OWN:
            opened.append(_open_own(files, name, root))
            _require_private(files, opened[-1], os.path.join(path, name))
    except BaseException:
        for descriptor in opened:
            with contextlib.suppress(OSError):
                files.close(descriptor)
        raise
    finally:
        with contextlib.suppress(OSError):
            files.close(root)
    return Folders(files, *opened)


def _open_own(files: Files, name: str, root: int) -> int:
    try:
        return files.open_folder(name, root)
    except FileNotFoundError:
        with contextlib.suppress(FileExistsError):
            files.make_folder(name, root)
        return files.open_folder(name, root)


def _restrict(files: Files, descriptor: int) -> None:
    state = files.state(descriptor)
    if stat.S_IMODE(state.mode) != 0o700 and state.owner == os.geteuid():
        # A read-only file system says no, and then nobody can write there anyway.
        with contextlib.suppress(OSError):
            files.restrict(descriptor)


def _require_private(files: Files, descriptor: int, path: str) -> None:
    _restrict(files, descriptor)
    state = files.state(descriptor)
    if state.mode & (stat.S_IWGRP | stat.S_IWOTH) or (
        state.owner != os.geteuid() and os.geteuid() != 0
    ):
        raise CacheError(
            f"other users can write to {path!r}, so nothing in it can be trusted; "
            "name a folder of your own."
        )


@contextlib.contextmanager
def closing(files: Files, descriptor: int) -> Iterator[int]:
    """Close a descriptor at the end; that this fails changes nothing that was read."""
    try:
        yield descriptor
    finally:
        with contextlib.suppress(OSError):
            files.close(descriptor)
