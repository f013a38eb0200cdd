"""A folder that holds one index, and always a whole one.

    folder/manifest.json            kind, settings, and the name, size and sha256 of every file
    folder/generation-<16 hex>/...  the files

A write makes a new generation beside the old one and then replaces the manifest, which is one
rename. Whoever reads meanwhile, and whoever starts after a crash, finds the old index or the new
one. The checksums find damage, not malice: open folders only from people whose models you would
load.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from rag_windows.errors import RetrievalError

T = TypeVar("T")

_FORMAT = 1
_MANIFEST = "manifest.json"
_GENERATION = re.compile(r"generation-[0-9a-f]{16}")
_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_ATTEMPTS = 5
_ABANDONED_S = 3600.0
"""A generation that no manifest names and nobody has touched for so long is a crash's remains."""


class _Vanished(Exception):
    """A file that the manifest names is not there; perhaps a writer was faster."""


def holds_index(folder: Path) -> bool:
    """Whether there is an index in the folder."""
    return (folder / _MANIFEST).is_file()


def write(
    folder: Path, kind: str, settings: Mapping[str, Any], fill: Callable[[Path], None]
) -> None:
    """Replace the folder's index.

    Args:
        folder: made where it is missing.
        kind: of index, checked when it is read.
        settings: JSON values that `read` hands back.
        fill: writes the index's files, without subfolders, into the folder it is given.

    Raises:
        RetrievalError: the folder can't be written.
    """
    with _telling(folder, "written"):
        folder.mkdir(parents=True, exist_ok=True)
        before = _current(folder)
        generation = folder / f"generation-{secrets.token_hex(8)}"
        generation.mkdir()
        try:
            fill(generation)
            files = {path.name: _describe(path, sync=True) for path in sorted(generation.iterdir())}
            _sync(generation)
            manifest = {
                "format": _FORMAT,
                "kind": kind,
                "settings": dict(settings),
                "generation": generation.name,
                "files": files,
            }
            _publish(folder, json.dumps(manifest, indent=1).encode())
        except BaseException:
            shutil.rmtree(generation, ignore_errors=True)
            raise
        _remove_old(folder, before)


def read(folder: Path, kind: str, load: Callable[[Path, Mapping[str, Any]], T]) -> T:
    """Check the folder's index and load it.

    Args:
        folder: as `write` left it.
        kind: of index that is expected.
        load: from (folder with the checked files, settings) to the index; a ValueError, KeyError,
            TypeError or IndexError that it raises means damage.

    Raises:
        RetrievalError: there is no index, it is of another kind or format, or it is damaged.
    """
    with _telling(folder, "read"):
        for attempt in range(_ATTEMPTS):
            manifest = _manifest(folder)
            if manifest is None:
                raise RetrievalError(f"There is no index in {folder}; save one there first.")
            if (found := manifest.get("format")) != _FORMAT:
                raise RetrievalError(
                    f"The index in {folder} has format {found!r}, and this version reads "
                    f"{_FORMAT}; build it anew."
                )
            if (found := manifest.get("kind")) != kind:
                raise RetrievalError(f"{folder} holds an index of kind {found!r}, not {kind!r}.")
            try:
                return load(_checked(folder, manifest), manifest["settings"])
            except (_Vanished, FileNotFoundError) as error:
                if attempt == _ATTEMPTS - 1 or _manifest(folder) == manifest:
                    raise _damaged(folder, f"{error} is missing") from error
            except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
                raise _damaged(folder, f"{type(error).__name__}: {error}") from error
    raise _damaged(folder, "it changes all the time")


def _damaged(folder: Path, why: str) -> RetrievalError:
    return RetrievalError(f"The index in {folder} is damaged ({why}); delete it and build it anew.")


@contextmanager
def _telling(folder: Path, done: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        problem = (error.strerror or type(error).__name__).lower()
        raise RetrievalError(f"The index in {folder} can't be {done}: {problem}.") from error


def _manifest(folder: Path) -> dict[str, Any] | None:
    try:
        found = json.loads((folder / _MANIFEST).read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, RecursionError) as error:
        raise _damaged(folder, "its manifest is no JSON") from error
    if not isinstance(found, dict):
        raise _damaged(folder, "its manifest is no JSON object")
    return found


def _current(folder: Path) -> str | None:
    """Name of the generation that is read now, where the manifest names one."""
    try:
        found = (_manifest(folder) or {}).get("generation")
    except RetrievalError:
        # A damaged index is what a new one is written over.
        return None
    return found if isinstance(found, str) and _GENERATION.fullmatch(found) else None


def _checked(folder: Path, manifest: Mapping[str, Any]) -> Path:
    name, files = manifest["generation"], manifest["files"]
    # The names come from a file, and must not lead out of the folder.
    if not _GENERATION.fullmatch(name) or not all(_FILE.fullmatch(file) for file in files):
        raise ValueError("the manifest names files elsewhere")
    for file, expected in files.items():
        path = folder / name / file
        try:
            described = _describe(path, sync=False)
        except FileNotFoundError as error:
            raise _Vanished(file) from error
        if described != expected:
            raise ValueError(f"{file} is not what was written")
    return folder / name


def _describe(path: Path, *, sync: bool) -> dict[str, Any]:
    if sync:
        # Windows syncs only what is open for writing.
        with path.open("r+b") as written:
            os.fsync(written.fileno())
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
        return {"bytes": stream.tell(), "sha256": digest}


def _publish(folder: Path, data: bytes) -> None:
    temporary = folder / f"{_MANIFEST}.{secrets.token_hex(8)}"
    try:
        with temporary.open("xb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, folder / _MANIFEST)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync(folder)


def _sync(folder: Path) -> None:
    # Windows opens no folder; its renames are durable without.
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _remove_old(folder: Path, before: str | None) -> None:
    current = _current(folder)
    for path in folder.iterdir():
        if path.name == current or not _GENERATION.fullmatch(path.name):
            continue
        try:
            abandoned = time.time() - path.stat().st_mtime > _ABANDONED_S
        except FileNotFoundError:
            continue
        if path.name == before or abandoned:
            # What can't be removed costs room and harms nothing.
            shutil.rmtree(path, ignore_errors=True)
