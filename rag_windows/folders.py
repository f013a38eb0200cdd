"""Where the passage cache lies, and beside it indexes and compiled kernels; imports no torch."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

from rag_windows.errors import CacheError

FOLDER_VARIABLE = "RAG_WINDOWS_CACHE_DIR"

INDEXES = "index"
"""The folder of indexes inside that of the cache."""

KERNELS = "kernels"
"""The folder of compiled C kernels inside that of the cache."""

_AUTOMATIC = re.compile("[0-9a-f]{32}")
"""Names of the indexes that commands make of --docs by themselves."""


def default_folder() -> Path:
    """``RAG_WINDOWS_CACHE_DIR``, else a folder in the platform's cache folder; not created here.

    Raises:
        CacheError: it would lie in the user's home folder, and there is none.
    """
    if chosen := os.environ.get(FOLDER_VARIABLE):
        return in_home(chosen)
    xdg = os.environ.get("XDG_CACHE_HOME", "")
    if sys.platform == "darwin":
        base = in_home("~/Library/Caches")
    else:  # the specification wants an absolute path
        base = Path(xdg) if os.path.isabs(xdg) else in_home("~/.cache")
    return base / "rag-windows" / "windows"


def in_home(path: str | Path) -> Path:
    """The path, ``~`` in front of it replaced; CacheError if the system knows no such home."""
    # Where there is no home, os.path leaves ~ as it is; HOME may be relative.
    found = os.path.expanduser(path)
    if str(path).startswith("~") and not os.path.isabs(found):
        raise CacheError(
            f"The cache's folder {str(path)!r} can't be found, as there is no such home folder. "
            f"Set HOME to one, or name a whole path in {FOLDER_VARIABLE}."
        )
    return Path(found)


def automatic_indexes(folder: Path) -> list[Path]:
    """The indexes beside a cache that commands made of --docs by themselves."""
    try:
        return sorted(one for one in (folder / INDEXES).iterdir() if _AUTOMATIC.fullmatch(one.name))
    except OSError:
        return []
