"""One index in one safetensors file, which is replaced as a whole.

Whoever reads meanwhile, and whoever starts after a crash, finds the old index or the new one. The
checksum finds damage, not malice: open indexes only from people whose models you would load.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from rag_windows import Passage
from rag_windows.errors import InputError, RetrievalError

Arrays: TypeAlias = dict[str, Any]
"""Name -> numpy array."""

_FORMAT = 2


def write(
    path: Path, passages: Sequence[Passage], settings: Mapping[str, Any], arrays: Arrays
) -> None:
    """Replace the index by passages without their scores, settings (JSON) and arrays."""
    from safetensors.numpy import save

    rows = "\n".join(_row(one) for one in passages)
    arrays = {**arrays, "passages": np.frombuffer(rows.encode("ascii"), dtype=np.uint8)}
    head = json.dumps({"format": _FORMAT, "settings": dict(settings)})
    data = save(arrays, {"index": head, "sha256": _digest(head, arrays)})
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as folder:
            fresh = Path(folder) / path.name
            with fresh.open("xb") as stream:
                stream.write(data)
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(fresh, path)
    except OSError as error:
        raise _failed(path, "written", error) from error


def read(path: Path, *names: str) -> tuple[tuple[Passage, ...], dict[str, Any], Arrays]:
    """Check the index and read it: passages, settings and arrays, those named among them."""
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        # Read, not mapped: a mapped file that someone truncates ends the process.
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError) as error:
        message = f"There is no index in {path.parent}; save one there first."
        raise RetrievalError(message) from error
    except OSError as error:
        raise _failed(path, "read", error) from error
    try:
        arrays = load(data)
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
        head = json.loads(header["index"])
        if head["format"] != _FORMAT:
            raise RetrievalError(f"The index {path} is of another version; build it anew.")
        if header["sha256"] != _digest(header["index"], arrays):
            raise ValueError("it is not what was written")
        if absent := set(names) - set(arrays):
            raise ValueError(f"it has no {sorted(absent)}")
        rows = arrays.pop("passages").tobytes().decode("ascii").splitlines()
        return tuple(Passage(**json.loads(row)) for row in rows), head["settings"], arrays
    except (ValueError, KeyError, TypeError, SafetensorError) as error:
        raise RetrievalError(
            f"The index {path} is damaged ({error}); delete it and build it anew."
        ) from error


def _row(passage: Passage) -> str:
    row = {"text": passage.text, "id": passage.id, "title": passage.title}
    try:
        return json.dumps({**row, "metadata": dict(passage.metadata)})
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(
            f"The metadata of passage {passage.id!r} can't be saved as JSON ({error}); "
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
