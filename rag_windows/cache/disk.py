"""The tier on disk: entries as files that several processes share."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from rag_windows import forks
from rag_windows.cache.changes import WAIT_S, Changes
from rag_windows.cache.codec import codec_named
from rag_windows.cache.container import FormatError
from rag_windows.cache.digest import DIGESTS
from rag_windows.cache.entry import Entry
from rag_windows.cache.entry_key import check_key
from rag_windows.cache.fetching import Fetcher, Outcome
from rag_windows.cache.files import Files, require_locks
from rag_windows.cache.folders import Folders, open_folders
from rag_windows.cache.format import Note, draw_up
from rag_windows.cache.listing import list_entries
from rag_windows.cache.locks import Lock, drop_dead_locks, is_locked, try_lock
from rag_windows.cache.stats import TierStats
from rag_windows.cache.trouble import Trouble
from rag_windows.cache.usage import Usage
from rag_windows.errors import InputError


class Verified(NamedTuple):
    """What reading everything found.

    Attributes:
        checked: entries read.
        quarantined: those among them that were put aside.
    """

    checked: int
    quarantined: int


class DiskTier:
    """Entries in a folder, under a limit in bytes, for all processes of one user.

    What goes wrong with the disk is a miss or an entry not stored, never an error: the first time
    is logged as a warning. Files that can't be proved right are put aside under ``quarantine``.

    Args:
        path: the folder; made if it is missing. Nothing outside it is touched.
        limit_bytes: most bytes of all files, those being written and those put aside included.
        store: name of the stored form; entries of other forms are not found.
        digest: "xxh3-128" or "sha256"; proves the payload. Either is read.
        wait_s: longest wait for other processes' changes, in seconds; a write waits twice at most.
        files: the system's calls.
        clock: unix time in seconds.

    Raises:
        InputError: for a name that doesn't exist or a negative limit.
        CacheError: if `path` is no folder, or other users can write in it, or the system has no
            file locks.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        limit_bytes: int,
        store: str = "as computed",
        *,
        digest: str = "xxh3-128",
        wait_s: float = WAIT_S,
        files: Files | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        require_locks()
        if digest not in DIGESTS:
            raise InputError(f"no digest is called {digest!r}; use one of {', '.join(DIGESTS)}.")
        self.path = os.path.abspath(os.path.expanduser(os.fspath(path)))
        self._files = files or Files()
        self._codec = codec_named(store)
        self._digest = digest
        self._clock = clock
        self._changes = Changes(limit_bytes, wait_s)
        self._fetcher = Fetcher(self._codec, clock)
        self._trouble = Trouble(self.path)
        self._counts: Counter[str] = Counter()
        self._counting = forks.Lock()
        self._closed = False
        self._folders: Folders | None = None
        self._open()

    def get_many(self, keys: Sequence[str]) -> dict[str, Entry]:
        """Return those that are there and proved right; see `Tier`."""
        asked = list(dict.fromkeys(map(check_key, keys)))
        folders = self._folders
        outcomes: dict[str, Outcome] = {}
        if folders is not None:
            outcomes = self._fetcher.fetch(folders, asked)
            self._settle(folders, outcomes)
        entries = {key: found.entry for key, found in outcomes.items() if found.entry is not None}
        self._changes.touch(asked)
        self._count(hits=len(entries), misses=len(asked) - len(entries))
        return entries

    def put(self, key: str, entry: Entry) -> bool:
        """Write an entry in place of the key's present one; False if it isn't there afterwards.

        Raises:
            CacheError: for a key that is none, or keys or values that are NaN or infinite.
        """
        check_key(key)
        try:
            image = draw_up(key, entry, self._codec, self._digest)
        except FormatError:
            self._count(refused=1)
            return False
        used = Usage(int(self._clock()), 1, entry.cost_s).as_ns()
        for again in (False, True):
            folders = self._folders or self._open()
            if folders is None:
                break
            try:
                stored = self._changes.write(folders, key, image, entry.cost_s, used)
            except FileNotFoundError as error:
                self._folders = None  # somebody removed the folders; once more with new ones
                if again:
                    self._trouble.tell(error)
            except OSError as error:
                self._trouble.tell(error)
                break
            else:
                self._count(**{"stored" if stored else "refused": 1})
                return stored
        self._count(failed=1)
        return False

    def remove(self, keys: Iterable[str]) -> int:
        """Drop entries; returns how many there were."""
        dropped = self._drop([check_key(key) for key in keys])
        self._count(removed=dropped)
        return dropped

    def clear(self) -> None:
        """Drop all entries, those being written and the files put aside."""
        folders = self._folders
        with self._trouble:
            if folders is not None:
                self._changes.clear(folders)

    def __contains__(self, key: str) -> bool:
        """Whether a file of that name is there; only reading proves it right."""
        check_key(key)
        return self._folders is not None and self._fetcher.exists(self._folders, key)

    def stats(self) -> TierStats:
        """Counters of this tier, and what the folder holds now, whoever stored it."""
        folders = self._folders
        sizes: list[int] = []
        with self._trouble:
            if folders is not None:
                sizes = [held.nbytes for held in list_entries(folders).values()]
        with self._counting:
            return TierStats(
                entries=len(sizes),
                bytes=sum(sizes),
                limit_bytes=self._changes.limit_bytes,
                evictions=self._changes.evictions,
                **self._counts,
            )

    def keys_with(self, labels: Collection[str]) -> list[str]:
        """Keys of the entries that carry any of the labels; every file's header is read."""
        wanted = set(labels)
        return [key for key, note in self._notes() if not wanted.isdisjoint(note.labels)]

    def prune(self, now: float) -> int:
        """Drop what has expired at unix time `now`, and what is too much.

        What older versions of this package and dead writers left goes, too.

        Returns:
            Entries that had expired or were of an older version.
        """
        folders = self._folders
        late = [
            key
            for key in self._keys()
            if folders is not None and self._fetcher.late(folders, key, now)
        ]
        dropped = self._drop(late)
        self._count(expired=dropped)
        with self._trouble:
            if folders is not None:
                self._changes.sync(folders)
                drop_dead_locks(folders)
        return dropped

    def verify(self) -> Verified:
        """Read every entry and put aside what can't be proved right; counts no uses."""
        folders = self._folders
        checked = quarantined = 0
        for key in self._keys():
            if folders is not None:
                outcome = self._fetcher.read(folders, key, count_use=False)
                checked += outcome != Outcome()
                quarantined += self._settle(folders, {key: outcome})
        return Verified(checked, quarantined)

    def try_lock(self, key: str) -> Lock | None:
        """Take the lock of a key; None if another living holder has it, here or elsewhere.

        Where locks don't work an inert one is given: the caller encodes what others may, too.
        """
        check_key(key)
        folders = self._folders
        with self._trouble:
            if folders is not None:
                return try_lock(folders, key)
        return Lock(self._files, None)

    def locked(self, key: str) -> bool:
        """Whether somebody alive holds the lock of a key."""
        check_key(key)
        folders = self._folders
        with self._trouble:
            return folders is not None and is_locked(folders, key)
        return False

    def close(self) -> None:
        """Stop using the folder: all that is asked for is missing from now on."""
        self._closed = True
        self._folders = None

    def _open(self) -> Folders | None:
        with self._trouble:
            if not self._closed:
                self._folders = folders = open_folders(self._files, self.path)
                self._changes.sync(folders)
        return self._folders

    def _settle(self, folders: Folders, outcomes: Mapping[str, Outcome]) -> int:
        """Do what reading called for; returns how many files were put aside."""
        aside = 0
        for key, found in outcomes.items():
            if found.error is not None:
                self._trouble.tell(found.error)
                self._count(failed=1)
            elif found.expired:
                self._count(expired=self._drop([key]))
            elif found.wrong is not None:
                with self._trouble:
                    moved = self._changes.put_aside(folders, key, found.wrong.inode)
                    self._count(quarantined=moved)
                    aside += moved
        return aside

    def _keys(self) -> list[str]:
        folders = self._folders
        with self._trouble:
            return [] if folders is None else list(list_entries(folders))
        return []

    def _notes(self) -> Iterator[tuple[str, Note]]:
        folders = self._folders
        for key in self._keys():
            note = None if folders is None else self._fetcher.note(folders, key)
            if note is not None:
                yield key, note

    def _drop(self, keys: Sequence[str]) -> int:
        folders = self._folders
        with self._trouble:
            return 0 if folders is None or not keys else self._changes.drop(folders, keys)
        return 0

    def _count(self, **counts: int) -> None:
        with self._counting:
            self._counts.update(counts)
