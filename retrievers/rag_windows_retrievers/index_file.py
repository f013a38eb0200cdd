"""One index in one safetensors file, which is replaced as a whole.

Whoever reads meanwhile, and whoever starts after a crash, finds the old index or the new one. The
checksum finds damage, not malice: open indexes only from people whose models you would load.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

from rag_windows import Passage
from rag_windows.errors import InputError, RetrievalError

Arrays: TypeAlias = dict[str, Any]
"""Name -> numpy array."""

_FORMAT = 2
_ABANDONED_S = 3600.0
"""A temporary file that nobody has touched for so long is what a crash left."""


def write(
    path: Path, passages: Sequence[Passage], settings: Mapping[str, Any], arrays: Arrays
) -> None:
    """Replace the index.

    Args:
        path: of the file; its folder is made where it is missing.
        passages: of the index; scores are not kept.
        settings: JSON values that `read` hands back.
        arrays: numpy arrays that `read` hands back.

    Raises:
        InputError: a passage's metadata can't be written as JSON.
        RetrievalError: the file can't be written.
    """
    import numpy as np
    from safetensors.numpy import save

    rows = "\n".join(_row(number, one) for number, one in enumerate(passages))
    arrays = {**arrays, "passages": np.frombuffer(rows.encode("ascii"), dtype=np.uint8)}
    head = json.dumps({"format": _FORMAT, "settings": dict(settings)})
    data = save(arrays, {"index": head, "sha256": _digest(head, arrays)})
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for old in path.parent.glob(f".{path.name}.*"):
            with suppress(FileNotFoundError):  # another writer was faster
                if time.time() - old.stat().st_mtime > _ABANDONED_S:
                    old.unlink()
        with temporary.open("xb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
        _sync(path.parent)
    except OSError as error:
        raise _failed(path, "written", error) from error
    finally:
        temporary.unlink(missing_ok=True)


def read(path: Path) -> tuple[tuple[Passage, ...], dict[str, Any], Arrays]:
    """Check the index and read it: passages, settings and arrays.

    Raises:
        RetrievalError: there is no index, it is of another format, or it is damaged.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        # Read, not mapped: a mapped file that someone truncates ends the process.
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise RetrievalError(
            f"There is no index in {path.parent}; save one there first."
        ) from error
    except OSError as error:
        raise _failed(path, "read", error) from error
    try:
        arrays = load(data)
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
        head = json.loads(header["index"])
        if (found := head["format"]) != _FORMAT:
            raise RetrievalError(
                f"The index {path} has format {found!r}, and this version reads {_FORMAT}; build "
                "it anew."
            )
        if header["sha256"] != _digest(header["index"], arrays):
            raise ValueError("it is not what was written")
        rows = arrays.pop("passages").tobytes().decode("ascii").splitlines()
        return tuple(Passage(**json.loads(row)) for row in rows), head["settings"], arrays
    except (ValueError, KeyError, TypeError, SafetensorError) as error:
        raise damaged(path, error) from error


def damaged(path: Path, why: object) -> RetrievalError:
    """The error for a file that is not what was written."""
    return RetrievalError(f"The index {path} is damaged ({why}); delete it and build it anew.")


def _row(number: int, passage: Passage) -> str:
    row = {"text": passage.text, "id": passage.id, "title": passage.title}
    try:
        return json.dumps({**row, "metadata": dict(passage.metadata)})
    except (TypeError, ValueError, RecursionError) as error:
        name = f"passage {number}" if passage.id is None else f"passage {passage.id!r}"
        raise InputError(
            f"The metadata of {name} can't be saved as JSON ({error}); "
            "keep strings, numbers, lists and objects in it."
        ) from error


def _digest(head: str, arrays: Arrays) -> str:
    digest = hashlib.sha256(head.encode())
    for name, array in sorted(arrays.items()):
        digest.update(f"{name} {array.dtype} {array.shape}".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def _failed(path: Path, done: str, error: OSError) -> RetrievalError:
    problem = (error.strerror or type(error).__name__).lower()
    return RetrievalError(f"The index {path} can't be {done}: {problem}.")


def _sync(folder: Path) -> None:
    # Windows opens no folder; its renames are durable without.
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
