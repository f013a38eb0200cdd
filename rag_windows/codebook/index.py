"""What a book stores of its passages, and the file that holds it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rag_windows.cache.disk import lock_file, require_locks
from rag_windows.errors import CacheError, InputError
from rag_windows.passage import Passage

NAME, LOCK = "book.json", "book.lock"
FORMAT = 1
_FIELDS = ("id", "text", "title", "score", "metadata")
Stamp = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Record:
    """A passage of a book, with its id, and the unix time at which it came or was found last.

    ``keys`` are those of its windows and pages in the cache, ``pages`` what is searched, (pages,
    width) fp32 in host memory; None before it is encoded, or where its text is blank.
    """

    passage: Passage
    used: float = 0.0
    keys: tuple[str, ...] = ()
    pages: torch.Tensor | None = None


def require_json(passage: Passage) -> None:
    """Refuse a passage whose metadata would not come back from a file as they are."""
    given = dict(passage.metadata)
    with contextlib.suppress(TypeError, ValueError, RecursionError):
        if json.loads(json.dumps(given)) == given:
            return
    raise InputError(
        f"The metadata of passage {passage.id!r} can't be kept in a file: {given!r}. Give plain "
        "JSON values (string keys, lists instead of tuples, no NaN), or a book without path=."
    )


class CodebookIndex:
    """The index of a book's folder: read and written as a whole, and sealed against damage.

    Processes that share it take `locked` for a change, and look at `stamp` for those of others.
    """

    def __init__(self, path: Path, wait_s: float) -> None:
        require_locks()
        self._folder = path
        self._file = path / NAME
        self._wait_s = wait_s
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise CacheError(f"The book's folder {str(path)!r} can't be used: {error}.") from error

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Be the only process that changes this book; CacheError if another one does not end."""
        lock = self._folder / LOCK
        try:
            release = lock_file(lock, wait_s=self._wait_s)
            if release is None:
                raise CacheError(
                    f"The book in {str(self._folder)!r} is being changed by process "
                    f"{lock.read_text('ascii', 'replace') or '?'}, which has not finished within "
                    f"{self._wait_s:g} s. Try again later, or with a larger wait_s. If that "
                    "process was stopped or hangs, continue it or end it."
                )
        except OSError as error:
            raise CacheError(f"The book can't be changed: {error}.") from error
        try:
            with contextlib.suppress(OSError):  # a full disk: then it has no name
                lock.write_text(str(os.getpid()), encoding="ascii")
            yield
        finally:
            release()

    def stamp(self) -> Stamp | None:
        """Changes whenever the file does; None if there is none."""
        try:
            state = self._file.lstat()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise CacheError(f"The book's index can't be read: {error}.") from error
        return state.st_ino, state.st_mtime_ns, state.st_size

    def read(self) -> tuple[Mapping[str, Any], dict[str, Record]] | None:
        """What the windows were made for, and the records by id; None if nothing is written yet."""
        try:
            whole = json.loads(self._file.read_bytes())
            body = whole["book"]
            if whole["seal"] != _seal(body):
                raise ValueError("its checksum is wrong")
            if body["format"] != FORMAT:
                raise CacheError(
                    f"The book in {str(self._folder)!r} has format {body['format']!r}, but this "
                    f"version reads {FORMAT}. Make the book again from its passages."
                )
            records = {}
            for one in body["passages"]:
                passage = Passage(**{name: one[name] for name in _FIELDS})
                records[str(passage.id)] = Record(passage, one["used"])
            return body["made for"], records
        except FileNotFoundError:
            return None
        except OSError as error:
            raise CacheError(f"The book's index can't be read: {error}.") from error
        except (ValueError, KeyError, TypeError, RecursionError, InputError) as error:
            raise CacheError(
                f"The index {str(self._file)!r} is damaged ({error}), so the book's passages are "
                "unknown. Restore it from a backup, or make the book again in another folder."
            ) from error

    def write(self, made_for: Mapping[str, Any], records: Iterable[Record]) -> Stamp | None:
        """Put an index in place of the present one, while `locked`; returns its stamp."""
        passages = []
        for one in records:
            stored = {name: getattr(one.passage, name) for name in _FIELDS}
            stored["metadata"] = dict(one.passage.metadata)
            passages.append({**stored, "used": one.used})
        body = {"format": FORMAT, "made for": made_for, "passages": passages}
        unfinished = self._folder / f"{NAME}.tmp"
        try:
            with open(unfinished, "w", encoding="ascii", opener=_private) as file:
                json.dump({"seal": _seal(body), "book": body}, file)
                file.flush()
                os.fsync(file.fileno())
            unfinished.replace(self._file)
            folder = os.open(self._folder, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        except OSError as error:
            with contextlib.suppress(OSError):
                unfinished.unlink()
            raise CacheError(f"The book's index can't be written: {error}.") from error
        return self.stamp()


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)


def _seal(body: Any) -> str:
    plain = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(plain.encode()).hexdigest()
