"""Reading entries, several at once."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from rag_windows.cache.codec import Codec
from rag_windows.cache.container import FormatError, OutdatedError
from rag_windows.cache.entry import Entry
from rag_windows.cache.folders import Folders
from rag_windows.cache.format import Note, decode
from rag_windows.cache.naming import entry_name
from rag_windows.cache.reading import OpenFile, WrongFileError, opened, read_payload, room_for
from rag_windows.cache.usage import from_ns
from rag_windows.errors import CacheError

_WORTH_THREADS_BYTES = 1 << 22  # below, starting threads takes longer than it saves
_MOST_THREADS = 8


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of reading one entry; nothing set means that there is none.

    Attributes:
        entry: the entry, proven right.
        expired: whether it was there, but its time is up, or an older version wrote it.
        wrong: why it can't be proved right.
        error: why it can't be read, though it may be right.
    """

    entry: Entry | None = None
    expired: bool = False
    wrong: WrongFileError | None = None
    error: OSError | None = None


class Fetcher:
    """Reads entries of one stored form; it has no state of a call.

    Args:
        codec: of that form.
        clock: unix time in seconds.
    """

    def __init__(self, codec: Codec, clock: Callable[[], float]) -> None:
        self._codec = codec
        self._clock = clock

    def fetch(self, folders: Folders, keys: Sequence[str]) -> dict[str, Outcome]:
        """Read entries; large ones by several threads, as digests and reads run outside the GIL."""
        found: dict[str, Outcome] = {}
        for place, key in enumerate(keys):
            found[key] = self.read(folders, key)
            entry = found[key].entry
            rest = keys[place + 1 :]
            if entry is not None and rest and entry.nbytes * len(rest) > _WORTH_THREADS_BYTES:
                found.update(self._fetch_in_threads(folders, rest))
                break
        return found

    def read(
        self,
        folders: Folders,
        key: str,
        count_use: bool = True,
        room: torch.Tensor | None = None,
    ) -> Outcome:
        """Read one entry, into `room` if there is any, and prove all of it."""
        try:
            with opened(folders, key) as file:
                if expired(file.note, self._clock()):
                    return Outcome(expired=True)
                return Outcome(entry=self._entry(folders, file, count_use, room))
        except FileNotFoundError:
            return Outcome()
        except OutdatedError:
            return Outcome(expired=True)
        except WrongFileError as error:
            return Outcome(wrong=error)
        except OSError as error:
            return Outcome(error=error)

    def note(self, folders: Folders, key: str) -> Note | None:
        """Read what an entry's header says; None if it is missing, wrong or can't be read."""
        try:
            with opened(folders, key) as file:
                return file.note
        except (OSError, FormatError):
            return None

    def late(self, folders: Folders, key: str, now: float) -> bool:
        """Whether an entry's time is up at unix time `now`, or an older version wrote it."""
        try:
            with opened(folders, key) as file:
                return expired(file.note, now)
        except OutdatedError:
            return True
        except (OSError, FormatError):
            return False

    def exists(self, folders: Folders, key: str) -> bool:
        """Whether a file of the entry's name is there."""
        try:
            folders.files.state_of(entry_name(key), folders.entries)
        except OSError:
            return False
        return True

    def _fetch_in_threads(self, folders: Folders, keys: Sequence[str]) -> dict[str, Outcome]:
        threads = min(_MOST_THREADS, os.cpu_count() or 1, len(keys))
        with ThreadPoolExecutor(threads, "rag-windows-cache") as pool:
            started = {
                key: pool.submit(self.read, folders, key, room=room_for(folders, key))
                for key in keys
            }
            return {key: outcome.result() for key, outcome in started.items()}

    def _entry(
        self, folders: Folders, file: OpenFile, count_use: bool, room: torch.Tensor | None
    ) -> Entry:
        note = file.note
        if note.codec != self._codec.name:
            raise FormatError(f"the file holds the form {note.codec!r:.40}.")
        payload = read_payload(folders.files, file, room)
        try:
            entry = decode(note, payload, self._codec)
        except FormatError:
            raise
        except (CacheError, ValueError, TypeError, KeyError, RuntimeError) as error:
            # Seal and digest are right, so somebody wrote it so; still it can't be proved right.
            raise FormatError(f"the file can't be decoded: {error}") from error
        if count_use:
            with contextlib.suppress(OSError):  # on a read-only file system uses aren't counted
                used = from_ns(file.state.modified_ns).used(self._clock())
                folders.files.set_modified(file.descriptor, used.as_ns())
        return entry


def expired(note: Note, now: float) -> bool:
    """Whether an entry may no longer be used at unix time `now`; a time that is no number has."""
    return note.expires is not None and not now < note.expires
