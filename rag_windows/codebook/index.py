"""What a book keeps of its passages, and the file in which it keeps it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from rag_windows.cache.locks import lock_file, require_locks
from rag_windows.errors import CacheError, InputError
from rag_windows.passage import Passage

NAME, LOCK = "book.json", "book.lock"
FORMAT = 1
Stamp = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Record:
    """A passage as a book keeps it, and the keys of its windows, which follow from its text.

    ``hits`` searches found it, the last of them number ``used`` of the book; it came at ``since``.
    """

    passage: Passage
    keys: tuple[str, ...] = ()
    hits: int = 0
    since: int = 0
    used: int = 0

    def usefulness(self, searches: int) -> tuple[float, int]:
        """The share of searches that found it, and the last that did; one hit is granted ahead."""
        return (self.hits + 1) / (searches - self.since + 1), self.used

    def as_json(self) -> dict[str, Any]:
        """What is written of it."""
        passage = self.passage
        return {
            "id": passage.id,
            "text": passage.text,
            "title": passage.title,
            "score": passage.score,
            "metadata": dict(passage.metadata),
            "uses": [self.hits, self.since, self.used],
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Read what `as_json` wrote."""
        passage = Passage(**{name: value[name] for name in value.keys() - {"uses"}})
        hits, since, used = value["uses"]
        return cls(passage, hits=hits, since=since, used=used)


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


def same_passage(one: Passage, other: Passage) -> bool:
    """Whether all but the id is equal."""
    return (one.text, one.title, one.score, dict(one.metadata)) == (
        other.text,
        other.title,
        other.score,
        dict(other.metadata),
    )


@dataclass(frozen=True, slots=True)
class Contents:
    """What an index holds: what its windows depend on, the searches so far, records by id."""

    made_for: Mapping[str, Any]
    searches: int
    records: Mapping[str, Record]


class Index:
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
        try:
            lock = lock_file(self._folder / LOCK, wait_s=self._wait_s)
            if lock is None:
                holder = ""
                with contextlib.suppress(OSError, ValueError):
                    holder = (self._folder / LOCK).read_text(encoding="ascii").strip()
                raise CacheError(
                    f"The book in {str(self._folder)!r} is being changed by process "
                    f"{holder or '?'}, which has not finished within {self._wait_s:g} s. If it was "
                    "stopped or hangs, continue it or end it; else try again later, or with a "
                    "larger wait_s."
                )
        except OSError as error:
            raise CacheError(f"The book can't be changed: {error}.") from error
        with lock:
            with contextlib.suppress(OSError):  # a full disk: then it has no name
                os.pwrite(lock.descriptor, f"{os.getpid():<20}".encode(), 0)
            yield

    def stamp(self) -> Stamp | None:
        """Changes whenever the file does; None if there is none."""
        try:
            state = self._file.lstat()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise CacheError(f"The book's index can't be read: {error}.") from error
        return state.st_ino, state.st_mtime_ns, state.st_size

    def read(self) -> Contents | None:
        """What is written; None if nothing was yet, CacheError where it is damaged."""
        try:
            whole = json.loads(self._file.read_bytes())
            body = whole["book"]
            if whole["seal"] != _seal(body):
                raise ValueError("its seal is wrong")
            if body["format"] != FORMAT:
                raise CacheError(
                    f"The book in {str(self._folder)!r} has format {body['format']!r}, and this "
                    f"version reads {FORMAT}; make it again from its passages."
                )
            records = map(Record.from_json, body["passages"])
            by_id = {str(one.passage.id): one for one in records}
            return Contents(body["made for"], body["searches"], by_id)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise CacheError(f"The book's index can't be read: {error}.") from error
        except (ValueError, KeyError, TypeError, RecursionError, InputError) as error:
            raise CacheError(
                f"The index {str(self._file)!r} is damaged ({error}), so the passages are not "
                "known. Bring it back from a backup, or make the book again in another folder."
            ) from error

    def write(self, contents: Contents) -> Stamp | None:
        """Put an index in place of the present one, while `locked`; returns its stamp."""
        body = {
            "format": FORMAT,
            "made for": dict(contents.made_for),
            "searches": contents.searches,
            "passages": [record.as_json() for record in contents.records.values()],
        }
        unfinished = self._folder / f"{NAME}.{secrets.token_hex(8)}.tmp"
        try:
            # What a process that was killed while writing has left.
            for left in self._folder.glob(f"{NAME}.{'[0-9a-f]' * 16}.tmp"):
                left.unlink()
            with open(unfinished, "x", encoding="ascii", opener=_private) as file:
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
