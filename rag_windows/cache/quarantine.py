"""Files that could not be proved right, put aside for whoever looks for the reason."""

from __future__ import annotations

import contextlib

from rag_windows.cache.folders import Folders
from rag_windows.cache.naming import aside_name, entry_name

SHARE = 16
"""The files put aside take at most one of so many parts of the tier's limit."""

MOST_FILES = 64


def put_aside(folders: Folders, key: str, inode: int | None) -> bool:
    """Move an entry's file out of readers' sight; links and folders move as they are.

    Args:
        folders: the tier's.
        key: the entry's checked key.
        inode: which file was found wrong; another one of that name stays. None: whichever.

    Returns:
        Whether it was there and moved.

    Raises:
        OSError: if the system can't.
    """
    files = folders.files
    try:
        if inode is not None and files.state_of(entry_name(key), folders.entries).inode != inode:
            return False
        files.rename(entry_name(key), folders.entries, aside_name(key), folders.quarantine)
    except FileNotFoundError:
        return False
    return True


def put_aside_bytes(folders: Folders) -> int:
    """Bytes of the files put aside.

    Raises:
        OSError: if the system can't say.
    """
    return sum(size for _, _, size in _listed(folders))


def trim(folders: Folders, limit_bytes: int, keep: int = 1) -> int:
    """Remove files put aside, those that lie there longest first, until the rest is in bounds.

    Args:
        folders: the tier's.
        limit_bytes: most bytes that may stay.
        keep: so many of the last ones stay whatever their size.

    Returns:
        Bytes removed.

    Raises:
        OSError: if the folder can't be listed.
    """
    listed = sorted(_listed(folders))
    held = sum(size for _, _, size in listed)
    freed = 0
    for place, (_, name, size) in enumerate(listed):
        left = len(listed) - place
        if left <= keep or (held - freed <= limit_bytes and left <= MOST_FILES):
            break
        if _remove(folders, name):
            freed += size
    return freed


def _listed(folders: Folders) -> list[tuple[int, str, int]]:
    """Time of the move, name and size of each."""
    found = []
    for name in folders.files.names(folders.quarantine):
        with contextlib.suppress(FileNotFoundError):
            state = folders.files.state_of(name, folders.quarantine)
            found.append((state.changed_ns, name, state.size))
    return found


def _remove(folders: Folders, name: str) -> bool:
    try:
        folders.files.remove(name, folders.quarantine)
    except IsADirectoryError:
        # Somebody made a folder of an entry's name: it goes if it is empty.
        with contextlib.suppress(OSError):
            folders.files.remove_folder(name, folders.quarantine)
        return False
    except OSError:
        return False
    return True
