"""The tier that machines share: entries as objects in a folder, in S3, or wherever fsspec reaches.

`entries/<first 2 digits>/<key>.safetensors` are the files of entry_file.py. Beside them lies an
empty marker `labels/<label>/<key>` for each label of an entry, so that whoever invalidates a
passage need not read them all. A marker is written before its entry and stays when the entry goes:
so no entry is ever without one, whoever writes and removes at the same time. Nothing is listed
while a request waits.
"""

from __future__ import annotations

import copy
import hashlib
import hmac
import math
import posixpath
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any, Literal, TypeVar

import numpy as np
import torch

from rag_windows.cache.codec import EXACT, Entry
from rag_windows.cache.entry_file import (
    ENDING,
    FormatError,
    entry_in,
    header_length,
    image_of,
    opened_image,
    read_header,
    verify_payload,
)
from rag_windows.cache.keys import check_key, is_key
from rag_windows.cache.remote import AT_ONCE, Remote, Rest, StoreCalls, in_words
from rag_windows.cache.tier import Outcome, Tier
from rag_windows.errors import CacheError
from rag_windows.threads import in_children

OPERATOR_S = 60.0
"""How long a command waits for the store's next answer; requests have deadlines of their own."""

_ABANDONED_S = 86_400.0  # age of a file half written that may go
_ALIGNMENT = 64  # what tensors in memory start at
_CHUNK = 1000  # objects that one call deletes
_HEAD_BYTES = 4096
_PART_BYTES = 8 << 20  # read at a time; s3fs is two to three times as fast as with 64 MiB at once
_DIGEST = re.compile("[0-9a-f]{32}")
_WRITING = re.compile(r"[0-9a-f]{64}(\.safetensors)?\.[0-9a-f]{16}\.tmp")
_OWN = re.compile(
    r"(/tenants/[0-9a-f]{32})?/"
    r"(entries/[0-9a-f]{2}/[0-9a-f]{64}\.safetensors|labels/[0-9a-f]{32}/[0-9a-f]{64})"
    r"(\.[0-9a-f]{16}\.tmp)?"
)
"""Paths below the store's folder, of all that is written there."""

T = TypeVar("T")


class _Arriving:
    """An entry that is read in parts, into the memory that its tensors will use.

    Args:
        key: its own.
        first: its first part, with all of the header; or all of it.
    """

    def __init__(self, key: str, first: bytes) -> None:
        self.file = opened_image(first, key, whole=len(first) != _PART_BYTES)
        size = len(self.file.payload)
        buffer = np.empty(size + _ALIGNMENT, np.uint8)
        start = -buffer.ctypes.data % _ALIGNMENT
        self.payload = buffer[start : start + size]
        self._take(self.file.payload.start, first[self.file.payload.start :])
        self.starts = range(max(_PART_BYTES, len(first)), self.file.nbytes, _PART_BYTES)

    def read(self, read: Callable[..., bytes], path: str, start: int) -> None:
        """Read one of the other parts."""
        stop = min(start + _PART_BYTES, self.file.nbytes)
        part = read(path, start=start, end=stop)
        if len(part) != stop - start:
            raise FormatError("the file ends too early.")
        self._take(start, part)

    def _take(self, start: int, part: bytes) -> None:
        at = start - self.file.payload.start
        self.payload[at : at + len(part)] = np.frombuffer(part, np.uint8)  # without the GIL


@dataclass(frozen=True, slots=True)
class _Got:
    """The outcome of reading one object; verified, if it is there."""

    outcome: str
    entry: _Arriving | None = None
    error: str = ""

    @classmethod
    def failed(cls, error: Exception) -> _Got:
        """The outcome of an error."""
        kinds = {FileNotFoundError: "missing", FormatError: "quarantined"}
        return cls(kinds.get(type(error), "failed"), error=in_words(error))


@dataclass(frozen=True, slots=True)
class _Object:
    """An object of the store; without a key it is no entry."""

    path: str
    key: str
    size: int = 0
    changed: float = math.inf

    @classmethod
    def of(cls, path: str, info: Mapping[str, Any]) -> _Object:
        """One from a listing; each store's library has its own name for the time of change."""
        times = (info.get(one) for one in ("LastModified", "mtime", "last_modified", "created"))
        time_of = next((one for one in times if isinstance(one, datetime | float | int)), math.inf)
        changed = time_of.timestamp() if isinstance(time_of, datetime) else float(time_of)
        return cls(path, _key_of(path), int(info.get("size") or 0), changed)


class StoreReading:
    """Entries being read from the store; what has not come by the deadline is missing."""

    def __init__(self, tier: SharedTier, keys: Sequence[str], within_s: float) -> None:
        self._tier, self._keys = tier, keys
        self._outcomes: Counter[str] = Counter()
        self._error = ""
        self._calls = StoreCalls(tier.remote, tier.fetch, keys, within_s)

    @property
    def under_way(self) -> bool:
        """Whether to wait for more."""
        return self._calls.outstanding > 0 and not self._calls.late

    def landed(self) -> dict[str, Entry]:
        """Entries that have come since the last time, each verified."""
        found: dict[str, Entry] = {}
        for key, got in self._calls.landed():
            entry, outcome = self._tier.decoded(got)
            self._outcomes[outcome] += 1
            self._error = got.error or self._error
            if entry is not None:
                found[key] = entry
        return found

    def close(self) -> None:
        """Give up what has not come; the store is paused if this happens repeatedly.

        How fast it answers for entries that it lacks does not show how fast it reads others.
        """
        self._calls.close()
        late = self._calls.outstanding
        self._calls.outstanding = 0
        if late and not self._calls.late:
            late = 0  # the request was cancelled, which says nothing of the store
        self._tier.finished(len(self._keys), late, self._outcomes)
        if late + self._outcomes["failed"] > self._outcomes["read"]:
            self._tier.remote.read_failed(self._error or "it takes longer than encoding")
        elif self._outcomes["read"]:
            self._tier.remote.reads.well()


class SharedTier(Tier):
    """Entries in a store that machines share, any of which may write and remove at any time.

    It has no limit: rules of the store itself, or `prune`, remove what is old or too much. A
    store that fails or is late repeatedly is paused for a while.

    Args:
        url: a folder, or a URL of fsspec.
        options: fsspec's storage options for it.
        store: the stored form.

    Raises:
        InputError: no such store or form, or options that it does not take.
        MissingExtraError: a package is not installed.
    """

    def __init__(
        self, url: str, options: Mapping[str, Any] | None = None, store: str = EXACT
    ) -> None:
        super().__init__(0, store)
        self.remote = Remote(url, options or {})
        self._folder = self.remote.root
        self._closed = False

    def of_tenant(self, salt: bytes) -> SharedTier:
        """The same store with a folder of this tenant's own, named by a digest of its salt."""
        other = copy.copy(self)
        name = hmac.digest(salt, b"folder of the shared store", hashlib.sha256).hex()[:32]
        other._folder = f"{self.remote.root}/tenants/{name}"
        in_children(other)
        return other

    def of_all(self) -> SharedTier:
        """The same store with the folders of all tenants."""
        other = copy.copy(self)
        other._folder = self.remote.root
        in_children(other)
        return other

    @property
    def unwritten(self) -> int:
        """How many entries this process could not write, of all tenants."""
        return self.remote.unwritten

    @property
    def url(self) -> str:
        """Where entries go; a tenant's folder can be given to the commands, too."""
        return f"{self.remote.protocol}://{self._folder}"

    def after_fork(self) -> None:
        """Nothing to do: only the store knows what it has."""
        self._lock = threading.Lock()

    # Reading

    def reading(self, keys: Sequence[str], within_s: float) -> StoreReading | None:
        """Begin to read entries; None while the store is paused."""
        asked = list(dict.fromkeys(map(check_key, keys)))
        if not asked or self._closed or not self.remote.reads.may():
            return None
        return StoreReading(self, asked, within_s)

    def get_many(self, keys: Sequence[str], within_s: float = OPERATOR_S) -> dict[str, Entry]:
        """Return the entries that come within so many seconds and are verified."""
        found: dict[str, Entry] = {}
        reading = self.reading(keys, within_s)
        if reading is not None:
            try:
                while reading.under_way:
                    found |= reading.landed()
                    time.sleep(0.001)
                found |= reading.landed()
            finally:
                reading.close()
        return found

    def fetch(self, key: str) -> _Got | Rest[_Got]:
        """Read one object and verify it, in threads that may be abandoned: no tensor is touched."""
        return self._read(self._path(key), key)

    def _read(self, path: str, key: str) -> _Got | Rest[_Got]:
        try:
            read = self.remote.system.cat_file
            entry = _Arriving(key, read(path, start=0, end=_PART_BYTES))
            if entry.file.expired(time.time()):
                return _Got("expired")
        except Exception as error:  # noqa: BLE001 - each store's library has errors of its own
            return _Got.failed(error)

        def end(error: Exception | None = None) -> _Got:
            try:
                if error is not None:
                    raise error
                verify_payload(entry.file, entry.payload.data)
            except Exception as wrong:  # noqa: BLE001 - whatever the parts raised
                return _Got.failed(wrong)
            return _Got("read", entry)

        parts = [partial(entry.read, read, path, start) for start in entry.starts]
        return Rest(parts, end) if parts else end()

    def decoded(self, got: _Got) -> tuple[Entry | None, str]:
        """The entry that was read, if it is one, and the outcome."""
        entry = _decoded(got, self._store)
        damaged = entry is None and got.entry is not None
        return entry, "quarantined" if damaged else got.outcome

    def finished(self, asked: int, late: int, outcomes: Counter[str]) -> None:
        """Count the outcomes of one request's reading."""
        counted = ("expired", "quarantined", "failed")
        counts = {name: outcomes[name] for name in counted if outcomes[name]}
        hits = outcomes["read"]
        self._count(hits=hits, misses=asked - hits, late=late, **counts)

    def present(self, keys: Collection[str]) -> set[str] | None:
        """Which entries the store has, by their names; None if it can't be asked now."""
        asked = list(dict.fromkeys(map(check_key, keys)))
        if self._closed or not asked or not self.remote.reads.may():
            return None

        def there(key: str) -> bool | None:
            try:
                return bool(self.remote.system.exists(self._path(key)))
            except Exception:  # noqa: BLE001 - each store's library has errors of its own
                return None

        self.remote.system.invalidate_cache()
        answers = dict(StoreCalls[bool | None](self.remote, there, asked, OPERATOR_S).all())
        if all(answers.get(key) is None for key in asked):
            self.remote.read_failed("it does not say what it has")
            return None
        self.remote.reads.well()
        return {key for key in asked if answers.get(key)}

    def __contains__(self, key: str) -> bool:
        """Whether the store has an object of that name; CacheError if it can't be asked."""
        return bool(self._there([check_key(key)]))

    def _look(self, keys: Sequence[str]) -> dict[str, Entry]:
        return self.get_many(keys)

    def _holds(self) -> tuple[int, int]:
        return 0, 0  # a store is never listed for figures

    # Writing

    def put(self, key: str, entry: Entry) -> bool:
        """See `Tier.put`."""
        stored = super().put(key, entry)
        with self.remote.lock:
            self.remote.unwritten += not stored
        return stored

    def leave_out(self) -> None:
        """Count an entry that is not written because too many wait."""
        self._count(refused=1)
        with self.remote.lock:
            self.remote.unwritten += 1

    def _put(self, key: str, entry: Entry) -> Outcome:
        if self._closed or not self.remote.writes.may():
            return "refused"
        try:
            image = b"".join(image_of(key, entry, self._store))
        except CacheError:
            return "refused"
        return self._written(key, entry.labels, image)

    def add_labels(self, key: str, labels: Collection[str]) -> None:
        """Give an entry more labels; its object stays as it is."""
        if not self._closed and self.remote.writes.may():
            self._written(key, labels)

    def _written(
        self, key: str, labels: Iterable[str], image: bytes | None = None
    ) -> Literal["stored", "failed"]:
        try:
            for label in labels:
                if _DIGEST.fullmatch(label):  # else it is none of ours, and must not name a path
                    self.remote.write(f"{self._folder}/labels/{label}/{key}", b"")
            if image is not None:
                self.remote.write(self._path(key), image)
        except Exception as error:  # noqa: BLE001 - each store's library has errors of its own
            self.remote.write_failed(in_words(error))
            return "failed"
        self.remote.writes.well()
        return "stored"

    # For operators: all tenants' folders, unless this is one tenant's; errors are raised

    def keys_with(self, labels: Collection[str]) -> list[str]:
        """Keys of the entries that carry any of the labels, as their markers say.

        Raises:
            CacheError: the store can't be asked.
        """
        markers = [f"{folder}/labels/{one}" for folder in self._folders() for one in labels]
        named = {key for names in self._each(self.remote.names, markers).values() for key in names}
        return sorted({path.key for path in self._there(filter(is_key, named))})

    def clear(self) -> None:
        """Remove all entries and markers of all tenants; other files stay.

        Raises:
            CacheError: something could not be removed.
        """
        root = self.remote.root
        found = self._each(self.remote.everything, [root]).get(root, [])
        own = [path for path in found if _OWN.fullmatch(path[len(root) :])]
        self._delete(own)
        self._count(removed=sum(path.endswith(ENDING) for path in own))

    def prune(self, now: float, older_than_s: float | None = None) -> int:
        """Drop what has expired, or was written longer ago than `older_than_s`; how much.

        Raises:
            CacheError: the store can't be listed, or something could not be removed.
        """
        oldest = None if older_than_s is None else now - older_than_s
        dropped = 0
        for found in self._listed(abandoned=now - _ABANDONED_S):
            old = {one.path: one for one in found if oldest is not None and one.changed < oldest}
            rest = [one.path for one in found if one.path not in old]
            expired = self._each(partial(self._expired, now=now), rest)
            gone = [*old, *(path for path, late in expired.items() if late)]
            self._delete(gone)
            dropped += len(gone)
        self._count(expired=dropped)
        return dropped

    def verify(self) -> tuple[int, int]:
        """Read every entry; delete damaged ones, write missing markers: how many of each kind.

        Raises:
            CacheError: the store can't be read, or something could not be removed.
        """
        checked = damaged = 0
        for found in self._listed():
            outcomes = self._each(self._verified, [one.path for one in found])
            bad = [path for path, outcome in outcomes.items() if outcome == "quarantined"]
            checked += sum(outcome != "missing" for outcome in outcomes.values())
            self._delete(bad)
            damaged += len(bad)
        self._count(quarantined=damaged)
        return checked, damaged

    def contents(self) -> tuple[int, int]:
        """How many entries there are, and their bytes, by listing the store.

        Raises:
            CacheError: the store can't be listed.
        """
        sizes = [one.size for found in self._listed() for one in found]
        return len(sizes), sum(sizes)

    def close(self) -> None:
        """Stop using the store."""
        self._closed = True

    def _drop(self, keys: Sequence[str]) -> int:
        found = self._there(keys)
        self._delete([one.path for one in found])
        return len({one.key for one in found})

    def _late(self, now: float) -> list[str]:
        return []  # `prune` does not ask

    def _folders(self) -> list[str]:
        """This tenant's folder, or that of the store and those of all its tenants."""
        root = self.remote.root
        if self._folder != root:
            return [self._folder]
        tenants = f"{root}/tenants"
        names = self._each(self.remote.names, [tenants])[tenants]
        return [root, *(f"{tenants}/{one}" for one in names if _DIGEST.fullmatch(one))]

    def _there(self, keys: Iterable[str]) -> list[_Object]:
        """Objects of these entries, in whatever folder."""
        self.remote.system.invalidate_cache()
        paths = {self._path(key, folder): key for folder in self._folders() for key in keys}
        there = self._each(self.remote.system.exists, list(paths))
        return [_Object(path, key) for path, key in paths.items() if there[path]]

    def _listed(self, abandoned: float | None = None) -> Iterator[list[_Object]]:
        """All entries, some at a time; files half written before `abandoned` are removed."""
        for folder in self._folders():
            entries = f"{folder}/entries"
            parts = [
                f"{entries}/{one}" for one in self._each(self.remote.names, [entries])[entries]
            ]
            for at in range(0, len(parts), AT_ONCE):
                files = self._each(self.remote.files, parts[at : at + AT_ONCE]).values()
                found = [_Object.of(path, info) for part in files for path, info in part.items()]
                if abandoned is not None:
                    self._delete(
                        [
                            one.path
                            for one in found
                            if _WRITING.fullmatch(posixpath.basename(one.path))
                            and one.changed < abandoned
                        ]
                    )
                yield [one for one in found if one.key]

    def _expired(self, path: str, now: float) -> bool:
        """Whether an entry has expired, by its first bytes; a damaged one has not."""
        read = self.remote.system.cat_file
        try:
            head = read(path, start=0, end=_HEAD_BYTES)
            length = header_length(head)
            if length > len(head):
                head = read(path, start=0, end=length)
            note, _ = read_header(head[:length], _key_of(path))
        except (FileNotFoundError, FormatError):
            return False
        return note.expires is not None and not now < note.expires

    def _verified(self, path: str) -> str:
        key = _key_of(path)
        got = self._read(path, key)
        if isinstance(got, Rest):
            for part in got.parts:
                got.do(part)
            got = got.end()
        if got.outcome == "failed":
            raise OSError(got.error)
        if got.entry is None:
            return got.outcome
        note = got.entry.file.note
        if _decoded(got, note.codec) is None:
            return "quarantined"
        folder = posixpath.dirname(posixpath.dirname(posixpath.dirname(path)))
        for label in note.labels:
            marker = f"{folder}/labels/{label}/{key}"
            if _DIGEST.fullmatch(label) and not self.remote.system.exists(marker):
                self.remote.write(marker, b"")
        return got.outcome

    def _each(self, call: Callable[[str], T], things: Collection[str]) -> dict[str, T]:
        """A call's result for each thing; CacheError unless all have one."""

        def attempt(thing: str) -> T | Exception:
            try:
                return call(thing)
            except Exception as error:  # noqa: BLE001 - each store's library has errors of its own
                return error

        calls = StoreCalls[T | Exception](self.remote, attempt, list(things), OPERATOR_S)
        found: dict[str, T] = {}
        reason = "it does not answer"
        for thing, one in calls.all():
            if isinstance(one, Exception):
                reason = in_words(one)
            else:
                found[thing] = one
        if len(found) < len(things):
            raise CacheError(
                f"The shared store {self.remote.name} can't be used: {reason}. Repeat this when it "
                "can be reached."
            )
        return found

    def _delete(self, paths: Sequence[str]) -> None:
        chunks = {str(at): paths[at : at + _CHUNK] for at in range(0, len(paths), _CHUNK)}
        self._each(lambda at: self.remote.delete(chunks[at]), chunks)

    # Names

    def _path(self, key: str, folder: str | None = None) -> str:
        return f"{folder or self._folder}/entries/{key[:2]}/{key}{ENDING}"


def _key_of(path: str) -> str:
    """The key of an entry's object; empty for all else."""
    name, ending = posixpath.splitext(posixpath.basename(path))
    return name if ending == ENDING and is_key(name) else ""


def _decoded(got: _Got, store: str) -> Entry | None:
    if got.entry is None:
        return None
    try:
        return entry_in(got.entry.file, store, torch.from_numpy(got.entry.payload))
    except FormatError:
        return None
