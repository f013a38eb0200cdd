"""Files that are written whole or not at all, under names that lead nowhere else."""

from __future__ import annotations

import hashlib
import os
import re
import secrets
from pathlib import Path

from rag_windows.errors import DataError
from rag_windows.evaluation.data.fields import Place

_LONGEST = 100
_ODD = re.compile(r"[^A-Za-z0-9._@+=-]")


def safe_name(name: str) -> str:
    """A file name for a name of others; different names give different file names.

    Letters, digits and ``._@+=-`` stay; where anything else stood, or the name is long or begins
    with a dot, a digest of the whole name is added.
    """
    plain = _ODD.sub("_", name)[:_LONGEST]
    if plain == name and not name.startswith(".") and name:
        return name
    digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:12]
    return f"{plain.lstrip('.')}-{digest}"


def write_whole(path: str | Path, text: str) -> None:
    """Write a text as UTF-8; a reader finds the old file or the new one, never a part.

    Args:
        path: of the file; its folder is made if it is missing.
        text: half surrogate pairs in it become U+FFFD.

    Raises:
        DataError: it can't be written.
    """
    target = Path(path)
    data = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        beside = target.with_name(f".{target.name}.{secrets.token_hex(8)}")
        try:
            with beside.open("xb") as stream:
                stream.write(data)
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(beside, target)
        except BaseException:
            beside.unlink(missing_ok=True)
            raise
    except (OSError, ValueError) as error:
        raise unwritable(path, error) from error


def unwritable(path: str | Path, error: Exception) -> DataError:
    """What to raise where a file can't be written."""
    reason = error.strerror if isinstance(error, OSError) else None
    return Place(str(path)).error(
        f"it can't be written ({reason or error}); check folder, permissions and free space."
    )
