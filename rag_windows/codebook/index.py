"""What a book keeps of its passages, and the file in which it keeps it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rag_windows.cache.keys import fields
from rag_windows.cache.locks import lock_file, require_locks
from rag_windows.errors import CacheError, InputError
from rag_windows.passage import Passage


@dataclass(frozen=True, slots=True)
class Record:
    """A passage as a book keeps it.

    Attributes:
        passage: with an id.
        keys: its windows' keys in the cache; not written, they follow from the text.
        hits: how many searches it was among the results of.
        since: searches of the book when the passage came.
        used: number of the last search that found it; `since` if none did.
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
    def from_json(cls, value: Mapping[str, Any]) -> Record:
        """Read what `as_json` wrote.

        Raises:
            CacheError: it is something else.
        """
        try:
            hits, since, used = (int(number) for number in value["uses"])
            passage = Passage(
                text=value["text"],
                id=value["id"],
                title=value["title"],
                score=None if value["score"] is None else float(value["score"]),
                metadata=dict(value["metadata"]),
            )
            if passage.id is None:
                raise ValueError("a passage has no id")
        except (KeyError, TypeError, ValueError, InputError) as error:
            raise CacheError(f"A passage in the book's index can't be read: {error}") from error
        return cls(passage, hits=hits, since=since, used=used)


def require_json(passage: Passage) -> None:
    """Refuse a passage that an index can't hold.

    Raises:
        InputError: its metadata are no JSON.
    """
    try:
        written = json.dumps(dict(passage.metadata))
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(
            f"The metadata of passage {passage.id!r} can't be kept in a file: {error}. Give plain "
            "JSON values (strings, numbers, lists, dicts), or a book without path=."
        ) from error
    if json.loads(written) != dict(passage.metadata):
        raise InputError(
            f"The metadata of passage {passage.id!r} would come back changed from a file; use "
            "string keys, lists instead of tuples, and no NaN."
        )


_WHAT = {
    "model": "another model (other weights, config or precision, or another version of torch or "
    "transformers)",
    "tokenizer": "another tokenizer or chat template",
    "prefix": "another prefix (system prompt or tools)",
    "encoding": "another encoding of its windows (another refinement, or none)",
}


def require_same(made_for: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuse windows that depend on something else than what there is now.

    Args:
        made_for: from `Preparer.made_for`, when the book was made.
        now: the same now.

    Raises:
        CacheError: naming all that differs.
    """
    differs = [what for name, what in _WHAT.items() if made_for.get(name) != now[name]]
    if differs:
        raise CacheError(
            f"This book was made with {'; and with '.join(differs)} than there is now. Open it as "
            "it was made, or make another book, in a folder of its own."
        )


def same_passage(one: Passage, other: Passage) -> bool:
    """Whether all but the id is equal."""
    return (one.text, one.title, one.score, dict(one.metadata)) == (
        other.text,
        other.title,
        other.score,
        dict(other.metadata),
    )


def made_id(passage: Passage) -> str:
    """An id that only an equal text and title give."""
    parts = [part.encode("utf-8", "surrogatepass") for part in (passage.title or "", passage.text)]
    return hashlib.sha256(fields(*parts)).hexdigest()[:32]


NAME, LOCK = "book.json", "book.lock"
FORMAT = 1
Stamp = tuple[int, int, int]
_UNFINISHED = re.compile(re.escape(NAME) + r"\.[0-9a-f]{16}\.tmp")


@dataclass(frozen=True, slots=True)
class Contents:
    """What an index holds.

    Attributes:
        made_for: what the book's windows depend on, by what people call it.
        searches: how many there were.
        records: by id, in the order in which they came.
    """

    made_for: Mapping[str, Any]
    searches: int
    records: Mapping[str, Record]


class Index:
    """Reads and writes the index; whole or not at all, and sealed against damage.

    Several processes may share it: each takes `locked` for a change and looks at `stamp` to see
    those of others. Its file names are its own; nothing of a passage gets into one.

    Args:
        path: the book's folder, made for this user only if it is missing.
        wait_s: longest wait for the change of another process, in seconds.

    Raises:
        CacheError: it can't be used.
    """

    def __init__(self, path: Path, wait_s: float) -> None:
        require_locks()
        self.path = path
        self._wait_s = wait_s
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.mkdir(mode=0o700, exist_ok=True)
            self._folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise CacheError(f"The book's folder {str(path)!r} can't be used: {error}.") from error

    def __del__(self) -> None:
        folder = getattr(self, "_folder", None)
        if folder is not None:
            with contextlib.suppress(OSError):
                os.close(folder)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Be the only process that changes this book.

        Raises:
            CacheError: another one did not end its change in time; the message names it.
        """
        try:
            lock = lock_file(LOCK, self._folder, wait_s=self._wait_s)
            if lock is None:
                raise CacheError(
                    f"The book in {str(self.path)!r} is being changed by {self._holder()}, which "
                    f"has not finished within {self._wait_s:g} s. If that process was stopped or "
                    "hangs, continue it or end it; else try again later, or with a larger wait_s."
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
            state = os.stat(NAME, dir_fd=self._folder, follow_symlinks=False)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise CacheError(f"The book's index can't be read: {error}.") from error
        return state.st_ino, state.st_mtime_ns, state.st_size

    def read(self) -> Contents | None:
        """What is written; None if nothing was yet.

        Raises:
            CacheError: it is damaged, or of another version.
        """
        try:
            with os.fdopen(self._opened(NAME, os.O_RDONLY), "rb") as file:
                raw = file.read()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise CacheError(f"The book's index can't be read: {error}.") from error
        try:
            whole = json.loads(raw)
            body = whole["book"]
            sealed = whole["seal"] == _seal(body)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise CacheError(self._damaged(str(error))) from error
        if not sealed:
            raise CacheError(self._damaged("its seal is wrong"))
        if body.get("format") != FORMAT:
            raise CacheError(
                f"The book in {str(self.path)!r} has format {body.get('format')!r}, and this "
                f"version reads {FORMAT}; make it again from its passages."
            )
        records = [Record.from_json(value) for value in body["passages"]]
        return Contents(
            body["made for"], int(body["searches"]), {str(one.passage.id): one for one in records}
        )

    def write(self, contents: Contents) -> Stamp | None:
        """Put an index in place of the present one, while `locked`; returns its stamp.

        Raises:
            CacheError: the system can't; the old one is still there then.
        """
        body = {
            "format": FORMAT,
            "made for": dict(contents.made_for),
            "searches": contents.searches,
            "passages": [record.as_json() for record in contents.records.values()],
        }
        data = memoryview(json.dumps({"seal": _seal(body), "book": body}).encode())
        name = f"{NAME}.{secrets.token_hex(8)}.tmp"
        try:
            self._drop_unfinished()
            descriptor = self._opened(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            try:
                while data:
                    data = data[os.write(descriptor, data) :]
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            os.rename(name, NAME, src_dir_fd=self._folder, dst_dir_fd=self._folder)
            os.fsync(self._folder)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=self._folder)
            raise CacheError(f"The book's index can't be written: {error}.") from error
        return self.stamp()

    def _opened(self, name: str, flags: int) -> int:
        flags |= os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW
        return os.open(name, flags, 0o600, dir_fd=self._folder)

    def _holder(self) -> str:
        """Who has the lock, as it has written there."""
        try:
            with os.fdopen(self._opened(LOCK, os.O_RDONLY), "rb") as file:
                return f"process {int(file.read(20))}"
        except (OSError, ValueError):
            return "another process"

    def _drop_unfinished(self) -> None:
        """Remove what a process that was killed while writing has left."""
        for name in os.listdir(self.path):
            if _UNFINISHED.fullmatch(name):
                os.unlink(name, dir_fd=self._folder)

    def _damaged(self, reason: str) -> str:
        return (
            f"The index {str(self.path / NAME)!r} is damaged ({reason}), so the passages are not "
            "known. Bring it back from a backup, or make the book again in another folder."
        )


def _seal(body: Any) -> str:
    plain = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(plain.encode()).hexdigest()
