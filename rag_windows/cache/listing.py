"""What lies in the folder of entries, seen without reading any file."""

from __future__ import annotations

import contextlib
import stat
from collections.abc import Collection
from dataclasses import dataclass, field

from rag_windows.cache.folders import Folders, closing
from rag_windows.cache.naming import FileName, parse_name
from rag_windows.cache.usage import Usage, from_ns

_UNKNOWN = Usage(0, 0, 1.0)


@dataclass(slots=True)
class Held:
    """What the folder holds under one key.

    Attributes:
        nbytes: of the entry, and reserved for files of it that are being written.
        usage: of the entry, or one that says nothing.
        names: of the files.
    """

    nbytes: int = 0
    usage: Usage = _UNKNOWN
    names: list[str] = field(default_factory=list)


def list_entries(folders: Folders, ours: Collection[str] | None = None) -> dict[str, Held]:
    """List entries and files being written; names that aren't the tier's are left out.

    Args:
        folders: the tier's.
        ours: names of files that this process is writing. If it is given, the lock around changes
            must be held, and what dead writers left is removed.

    Raises:
        OSError: if the folder can't be listed.
    """
    found: dict[str, Held] = {}
    for text in folders.files.names(folders.entries):
        name = parse_name(text)
        if name is None:
            continue
        if name.reserved is not None:
            if ours is not None and text not in ours and _reclaimed(folders, name):
                continue
            nbytes, usage = name.reserved, None
        else:
            try:
                state = folders.files.state_of(text, folders.entries)
            except FileNotFoundError:
                continue
            if not stat.S_ISREG(state.mode):
                continue  # reading puts it aside
            nbytes, usage = state.size, from_ns(state.modified_ns)
        held = found.setdefault(name.key, Held())
        held.nbytes += nbytes
        held.usage = usage or held.usage
        held.names.append(text)
    return found


def _reclaimed(folders: Folders, name: FileName) -> bool:
    """Remove a file whose writer is dead; a living one holds the file's lock."""
    files = folders.files
    with (
        contextlib.suppress(OSError),
        closing(files, files.open_lock(name.text, folders.entries, False)) as opened,
    ):
        if files.lock(opened):
            files.remove(name.text, folders.entries)
            return True
    return False
