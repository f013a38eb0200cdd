"""Writing a file so that it is there whole or not at all."""

from __future__ import annotations

import errno

from rag_windows.cache.files import Files
from rag_windows.cache.folders import Folders
from rag_windows.cache.format import Image
from rag_windows.cache.naming import entry_name

_MOST_BYTES = 1 << 26  # a call; some systems refuse 2 GiB


def fill(files: Files, descriptor: int, image: Image, modified_ns: int) -> None:
    """Write a new file's content and wait until the medium has it.

    Raises:
        OSError: if the system can't.
    """
    for part in (memoryview(image.header), *image.payload):
        done = 0
        while done < len(part):
            count = files.write(descriptor, part[done : done + _MOST_BYTES])
            if count <= 0:
                raise OSError(errno.EIO, "nothing was written")
            done += count
    files.set_modified(descriptor, modified_ns)
    files.flush(descriptor)


def show(folders: Folders, name: str, key: str) -> None:
    """Give a written file its entry's name, for every reader at once.

    Raises:
        FileNotFoundError: if somebody took the file away, to make room or to clear the cache.
        OSError: if the system can't; the entry isn't there then.
    """
    folders.files.rename(name, folders.entries, entry_name(key), folders.entries)
