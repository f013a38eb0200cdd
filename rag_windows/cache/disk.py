"""The tier on disk: entries as files that several processes share."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import secrets
import stat
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Literal, NamedTuple
from weakref import finalize

import torch

from rag_windows import threads
from rag_windows.cache.catalog import Catalog, CatalogBusyError, CatalogError, Row, Rows
from rag_windows.cache.codec import Entry, check_store
from rag_windows.cache.counters import TierStats
from rag_windows.cache.entry_file import (
    ENDING,
    FormatError,
    OutdatedError,
    image_of,
    opened,
    read_entry,
    write_image,
)
from rag_windows.cache.keys import check_key, is_key
from rag_windows.cache.locks import FileLock, flock, is_locked, lock_file, require_locks
from rag_windows.cache.policy import Policy
from rag_windows.errors import CacheError

logger = logging.getLogger(__name__)

MOST_LABELS = 16
"""Ids that one entry may carry: windows of equal text are one entry, whatever their ids."""

USES_TOGETHER = 512
"""Uses that are written into the catalog together."""

_WRITING = re.compile(r"[0-9a-f]{64}\.([0-9]{1,19}\.)?[0-9a-f]{16}\.tmp")
_ASIDE_SHARE, _MOST_ASIDE = 16, 64
"""Files put aside take at most one of so many parts of the limit, and are at most so many."""

_WORTH_THREADS_BYTES = 1 << 22  # below, starting threads takes longer than it saves
_MOST_THREADS = 8

_FILE_MODE, _MORE_LABELS_MODE = 0o600, 0o400
"""A file that can't be written has labels that only the catalog holds: without them it goes."""

Outcome = Literal["read", "missing", "expired", "quarantined", "failed"]
"""What came of reading an entry."""


class Verified(NamedTuple):
    """How many entries were read, and how many of them were put aside."""

    checked: int
    quarantined: int


class DiskTier:
    """Entries in a folder, under a limit in bytes, for all processes of one user.

    What goes wrong with the disk is a miss or an entry not stored, never an error: the first time
    is logged as a warning. Files that can't be proved right are put aside under ``quarantine``.
    Lookups read the files alone; what else is known of them is in the `Catalog`, and what is done
    to both is done in one of its changes, files first. A process that dies on the way leaves rows
    without files or files without rows, and the next one to open the folder finds them.

    Args:
        path: the folder; made if it is missing. Nothing outside it is touched.
        limit_bytes: most bytes of all files, those being written and those put aside included; the
            catalog's few hundred bytes an entry come on top.
        store: name of the stored form; entries of other forms are not found.

    Raises:
        InputError: for a form that doesn't exist or a negative limit.
        CacheError: if `path` is no folder, or other users can write in it, or the system has no
            file locks.
    """

    def __init__(
        self, path: str | os.PathLike[str], limit_bytes: int, store: str = "as computed"
    ) -> None:
        require_locks()
        self.path = os.path.abspath(os.path.expanduser(os.fspath(path)))
        self.limit_bytes = limit_bytes
        self._store = check_store(store)
        folders = "entries", "locks", "quarantine", "catalog"
        self._folders = tuple(os.path.join(self.path, name) for name in folders)
        self._entries, self._locks, self._aside, catalog = self._folders
        self._catalog = Catalog(os.path.join(catalog, "windows.sqlite"))
        self._trouble = _Trouble(self.path)
        self._counts: Counter[str] = Counter()
        self._usable = True
        self._closed = False
        self._seen = 0  # the catalog's version that the policy knows
        finalize(self, Catalog.write_uses, self._catalog)
        self.after_fork()
        threads.in_children(self)
        with self._trouble:
            self._prepare()
            with self._changing():
                pass  # brings catalog and files in line

    def after_fork(self) -> None:
        """A child looks into the folder before it writes there; what is counted is the parent's."""
        self._lock = threading.Lock()  # around policy and counts
        self._policy = Policy(self.limit_bytes)

    # Reading

    def get_many(self, keys: Sequence[str]) -> dict[str, Entry]:
        """Return the entries that are there and proved right; the other keys are missing.

        Large ones are read by several threads, as digests and reads run outside the GIL.
        """
        asked = list(dict.fromkeys(map(check_key, keys)))
        found: dict[str, Entry | None] = {}
        for place, key in enumerate(asked):
            found[key] = entry = self._read(key)[0]
            rest = asked[place + 1 :]
            if entry is not None and entry.nbytes * len(rest) > _WORTH_THREADS_BYTES:
                rooms = [self._room(other) for other in rest]
                count = min(_MOST_THREADS, os.cpu_count() or 1, len(rest))
                with ThreadPoolExecutor(count, "rag-windows-cache") as pool:
                    read = pool.map(self._read, rest, rooms)
                    found.update({other: one for other, (one, _) in zip(rest, read, strict=True)})
                break
        entries = {key: entry for key, entry in found.items() if entry is not None}
        self._catalog.used(entries)
        with self._lock:
            for key in asked:
                self._policy.touch(key)
        self._count(hits=len(entries), misses=len(asked) - len(entries))
        return entries

    def write_uses(self) -> None:
        """Write into the catalog which entries were used; never on the way to an answer."""
        self._catalog.write_uses()

    @property
    def many_uses(self) -> bool:
        """Whether there are enough uses that `write_uses` should write them."""
        return len(self._catalog.uses) >= USES_TOGETHER

    def __contains__(self, key: str) -> bool:
        """Whether a file of that name is there; only reading proves it right."""
        return self._usable and os.path.lexists(self._path(check_key(key)))

    def stats(self) -> TierStats:
        """Counters of this tier, and what the folder holds now, whoever stored it."""
        sizes: list[int] = []
        with self._trouble:
            if self._usable:
                sizes = [
                    state.st_size
                    for path, state in _states(self._entries)
                    if _key_of(os.path.basename(path)) and not stat.S_ISDIR(state.st_mode)
                ]
        with self._lock:
            return TierStats(
                entries=len(sizes), bytes=sum(sizes), limit_bytes=self.limit_bytes, **self._counts
            )

    def verify(self) -> Verified:
        """Read every entry and put aside what can't be proved right; counts no uses."""
        outcomes = Counter(self._read(key)[1] for key in self._keys())
        return Verified(outcomes.total() - outcomes["missing"], outcomes["quarantined"])

    def _read(self, key: str, room: torch.Tensor | None = None) -> tuple[Entry | None, Outcome]:
        """Read one entry, into `room` if there is any, and prove all of it; what is wrong goes.

        This is on the way to an answer, so the catalog is left for the next change.
        """
        outcome: Outcome = "missing"
        if not self._usable:
            return None, outcome
        with self._trouble:
            try:
                with opened(self._path(key), key) as file:
                    if not _is_over(file.header.note.expires):
                        return read_entry(file, self._store, room), "read"
                raise OutdatedError("its time is up.")
            except FileNotFoundError:
                return None, outcome
            except OutdatedError:
                outcome = "expired" if self._unlink(key) else outcome
            except FormatError as error:
                outcome = "quarantined" if self._put_aside(key, error.inode) else outcome
            except OSError as error:
                outcome = "failed"
                self._trouble.tell(error)
        if outcome != "missing":
            self._count(**{outcome: 1})
        if outcome != "failed":
            with self._lock:
                self._policy.forget(key)
        return None, outcome

    def _room(self, key: str) -> torch.Tensor | None:
        """Memory for a thread to read an entry into.

        What threads allocate themselves comes from heaps that the C library gives back as soon as
        they are free, and new pages cost more than reading into old ones.
        """
        with contextlib.suppress(OSError, RuntimeError):  # no file, or no memory: reading will tell
            state = os.stat(self._path(key), follow_symlinks=False)
            if stat.S_ISREG(state.st_mode):
                return torch.empty(state.st_size, dtype=torch.uint8)
        return None

    # Writing

    def put(self, key: str, entry: Entry) -> bool:
        """Write an entry in place of the key's present one; False if it isn't there afterwards."""
        check_key(key)
        outcome = "failed"
        with self._trouble:
            try:
                if not self._closed:
                    self._prepare()
                    outcome = "stored" if self._write(key, entry) else "refused"
            except (BlockingIOError, FormatError):
                outcome = "refused"
        self._count(**{outcome: 1})
        return outcome == "stored"

    def _write(self, key: str, entry: Entry) -> bool:
        """Write a file; whole or not at all. False if it is refused.

        Raises:
            FormatError: it can't be stored.
            BlockingIOError: other processes' changes did not end in time.
            OSError: if the system can't; the entry isn't there then.
        """
        image = image_of(key, entry, self._store)
        name = f"{key}.{secrets.token_hex(8)}.tmp"
        writing, path = os.path.join(self._entries, name), self._path(key)
        size = sum(part.nbytes for part in image)
        row = Row(key, size, entry.cost_s, entry.expires, 1, time.time(), name)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = None
        left = [writing]
        try:
            with self._changing() as rows:
                if not self._make_room(rows, row):
                    return False
                rows.put(row, entry.labels)
                descriptor = os.open(writing, flags, _FILE_MODE)
                flock(descriptor)  # as long as it is held, the file has a living writer
            write_image(descriptor, image)
            with self._changing() as rows:
                if rows.writing(key) != (name,):
                    return False  # taken away meanwhile, to make room or to clear the cache
                left.append(path)
                with contextlib.suppress(FileNotFoundError):
                    os.rename(writing, path)
                    rows.execute("UPDATE entries SET writing = NULL WHERE key = ?", (key,))
                    left.remove(writing)
            if writing in left:
                return False
            _fsync(self._entries)
            left.clear()
        finally:
            if descriptor is not None:
                if left:
                    self._catalog.in_line = False
                    with self._lock:
                        self._policy.forget(key)
                for one in left:
                    with contextlib.suppress(OSError):
                        os.unlink(one)
                with contextlib.suppress(OSError):
                    os.close(descriptor)
        return True

    def _make_room(self, rows: Rows, wanted: Row) -> bool:
        """Drop what is worth less than an entry, and the present one of its key.

        Returns:
            False if it is not worth what would have to go, or doesn't fit.
        """
        if rows.version != self._seen and rows.nbytes + wanted.nbytes > self.limit_bytes:
            self._sync(rows)
        for _ in range(2):
            with self._lock:
                victims = self._policy.admit(wanted.key, wanted.nbytes, wanted.cost_s)
            if victims is None:
                return False
            self._evict(rows, victims)
            self._unlink(wanted.key)
            rows.remove([wanted.key])
            if rows.nbytes + self._aside_bytes() + wanted.nbytes <= self.limit_bytes:
                return True
            # Others have written, or files put aside take the room.
            self._trim_aside(0, 0)
            with self._lock:
                self._policy.forget(wanted.key)
            self._sync(rows)
        return False

    def _evict(self, rows: Rows, keys: Collection[str]) -> None:
        for key in keys:
            self._unlink(key)
        rows.remove(keys)
        self._count(evictions=len(keys))

    # Labels

    def add_labels(self, key: str, labels: Collection[str]) -> None:
        """Give an entry more labels, as far as it may have so many; its file stays as it is."""
        with self._trouble, self._changing(lasting=True) as rows:
            held = rows.labels(key)
            missing = [label for label in dict.fromkeys(labels) if label not in held]
            missing = missing[: max(0, MOST_LABELS - len(held))]
            if missing and rows.writing(key) is not None:
                with contextlib.suppress(FileNotFoundError):
                    os.chmod(self._path(key), _MORE_LABELS_MODE)
                rows.add_labels(key, missing)

    def labels(self, keys: Iterable[str]) -> dict[str, set[str]]:
        """The labels of entries, as far as they are known; never on the way to an answer."""
        with self._trouble, self._changing() as rows:
            return {key: rows.labels(key) for key in keys}
        return {}

    def keys_with(self, labels: Collection[str]) -> list[str]:
        """Keys of the entries that carry any of the labels.

        Where the catalog can't be used, the files are read: those that may carry more labels than
        they hold are named, too.
        """
        if not self._usable:
            return []
        with self._trouble, self._changing() as rows:
            return [key for key in rows.labelled(labels) if is_key(key) and key in self]
        found = []
        for key in self._keys():
            with contextlib.suppress(OSError, FormatError), opened(self._path(key), key) as file:
                if file.more_labels or not set(labels).isdisjoint(file.header.note.labels):
                    found.append(key)
        return found

    # Forgetting

    def remove(self, keys: Iterable[str]) -> int:
        """Drop entries; returns how many there were."""
        dropped = self._drop([check_key(key) for key in keys])
        self._count(removed=dropped)
        return dropped

    def prune(self, now: float) -> int:
        """Drop what has expired at unix time `now`, and what is too much.

        What older versions of this package and dead writers left goes, too.

        Returns:
            Entries that had expired or were of an older version.
        """
        late: list[str] = []
        with self._trouble:
            with self._changing() as rows:
                self._sync(rows)
                late = [key for key in rows.expired(now) if is_key(key)]
            for name in os.listdir(self._locks):
                with contextlib.suppress(OSError):  # what can't be locked is no lock of ours
                    is_locked(Path(self._locks, name))  # takes a dead holder's file away
        dropped = self._drop(late)
        self._count(expired=dropped)
        return dropped

    def clear(self) -> None:
        """Drop all entries, those being written and the files put aside."""
        with self._trouble:
            if self._usable:
                self._unlink_all()  # whatever becomes of the catalog
            with self._changing() as rows:
                rows.execute("DELETE FROM entries")
                self._unlink_all()
                with self._lock:
                    self._policy.clear()

    def _drop(self, keys: Sequence[str]) -> int:
        """Drop entries; without the catalog if it is not to be had: what shall go must go."""
        dropped = 0
        with self._trouble:
            try:
                if keys and self._usable:
                    with self._changing() as rows:
                        dropped = sum(map(self._unlink, keys))
                        rows.remove(keys)
            except CatalogError:
                dropped += sum(map(self._unlink, keys))
                raise
            finally:
                with self._lock:
                    for key in keys:
                        self._policy.forget(key)
        return dropped

    def _unlink(self, key: str) -> bool:
        """Remove an entry's file; False if there was none."""
        try:
            os.unlink(self._path(key))
        except (FileNotFoundError, IsADirectoryError):
            return False
        return True

    def _unlink_all(self) -> None:
        for name in os.listdir(self._entries):
            if _key_of(name) or _WRITING.fullmatch(name):
                with contextlib.suppress(FileNotFoundError, IsADirectoryError):
                    os.unlink(os.path.join(self._entries, name))
        self._trim_aside(0, 0)

    # Locks of keys

    def try_lock(self, key: str) -> FileLock | None:
        """Take the lock of a key; None if another living holder has it, here or elsewhere.

        Where locks don't work one that locks nothing is given: the caller encodes what others may,
        too.
        """
        check_key(key)
        if self._usable:
            with self._trouble:
                return lock_file(Path(self._locks, key))
        return FileLock()

    def locked(self, key: str) -> bool:
        """Whether somebody alive holds the lock of a key."""
        check_key(key)
        with self._trouble:
            return self._usable and is_locked(Path(self._locks, key))
        return False

    # The folder and its catalog

    def close(self) -> None:
        """Stop using the folder: all that is asked for is missing from now on."""
        self.write_uses()
        self._closed, self._usable = True, False
        self._catalog.disconnect()

    def _prepare(self) -> None:
        """Make the folders that are missing, for this user only.

        Raises:
            CacheError: the path is no folder, or a folder in it is open to other users' writing.
            OSError: the system can't, or a folder in it is a link.
        """
        try:
            os.makedirs(self.path, mode=0o700, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            raise CacheError(f"the cache's path {self.path!r} is not a folder.") from error
        if {os.path.join(self.path, name) for name in os.listdir(self.path)} <= {*self._folders}:
            _restrict(self.path)  # a folder that holds other things, too, is left as it is
        for folder in self._folders:
            if not os.path.lexists(folder):
                with contextlib.suppress(FileExistsError):
                    os.mkdir(folder, 0o700)
            self._usable = stat.S_ISDIR(os.stat(folder, follow_symlinks=False).st_mode)
            if not self._usable:
                raise NotADirectoryError(errno.ENOTDIR, "no folder of the cache's own", folder)
            state = _restrict(folder)
            if state.st_mode & 0o022 or os.geteuid() not in (state.st_uid, 0):
                self._usable = False
                raise CacheError(
                    f"other users can write to {folder!r}, so nothing in it can be trusted; "
                    "name a folder of your own."
                )

    @contextlib.contextmanager
    def _changing(self, *, lasting: bool = False) -> Iterator[Rows]:
        """Change catalog and files together.

        Raises:
            BlockingIOError: another process did not end its change in time.
            OSError: the catalog can't be used.
        """
        if not self._usable:
            raise CatalogBusyError(errno.EAGAIN, "the folder is not in use")
        with self._catalog.changing(lasting=lasting) as rows:
            if not self._catalog.in_line:
                self._sync(rows)
            yield rows
            self._catalog.in_line = True

    def _sync(self, rows: Rows) -> None:
        """Bring catalog, files and policy in line.

        What dead writers left goes, and so does what is too much.
        """
        files: set[str] = set()
        writing: set[str] = set()
        for name in os.listdir(self._entries):
            key = _key_of(name)
            if key is not None:
                files.add(key)
            elif _WRITING.fullmatch(name) and not _reclaimed(os.path.join(self._entries, name)):
                writing.add(name)
        known = {row.key: row for row in rows.all()}
        rows.remove(
            key
            for key, row in known.items()
            if row.writing not in writing and (key not in files or row.writing is not None)
        )
        for key in files:
            if key not in known or known[key].writing not in (None, *writing):
                self._adopt(rows, key)
        held = {row.key: row for row in rows.all()}
        with self._lock:
            victims = self._policy.sync(
                (row.key, row.nbytes, row.cost_s, row.uses) for row in held.values()
            )
        self._evict(rows, [key for key in victims if is_key(key) and key in held])
        if rows.nbytes + self._aside_bytes() > self.limit_bytes:
            self._trim_aside(0, 0)
        self._seen = rows.version

    def _adopt(self, rows: Rows, key: str) -> None:
        """Note an entry whose file the catalog does not know."""
        path = self._path(key)
        try:
            with opened(path, key) as file:
                note, state = file.header.note, file.state
                last_used = min(state.st_mtime, time.time())
                row = Row(key, state.st_size, note.cost_s, note.expires, 1, last_used, None)
                if file.more_labels:
                    self._unlink(key)  # nobody knows under which ids it is to be found
                else:
                    rows.put(row, note.labels)
        except OutdatedError:
            size = os.stat(path, follow_symlinks=False).st_size
            rows.put(Row(key, size, 0.0, 0.0, 0, 0.0, None), ())
        except FormatError as error:
            self._count(quarantined=self._put_aside(key, error.inode))
        except OSError:
            return  # reading will tell

    def _path(self, key: str) -> str:
        return os.path.join(self._entries, key + ENDING)

    def _keys(self) -> list[str]:
        with self._trouble:
            if self._usable:
                return [key for name in os.listdir(self._entries) if (key := _key_of(name))]
        return []

    # Files put aside

    def _put_aside(self, key: str, inode: int | None) -> bool:
        """Move an entry's file out of readers' sight; links and folders move as they are.

        Args:
            key: the entry's.
            inode: which file was found wrong; another one of that name stays. None: whichever.

        Returns:
            Whether it was there and moved.
        """
        path = self._path(key)
        try:
            if inode is not None and os.stat(path, follow_symlinks=False).st_ino != inode:
                return False
            os.rename(path, os.path.join(self._aside, f"{key}.{secrets.token_hex(8)}.bad"))
        except FileNotFoundError:
            return False
        self._trim_aside(self.limit_bytes // _ASIDE_SHARE, _MOST_ASIDE)
        return True

    def _aside_bytes(self) -> int:
        return sum(state.st_size for _, state in _states(self._aside))

    def _trim_aside(self, most_bytes: int, most_files: int) -> None:
        """Remove files put aside, the oldest first; one may be larger than all may be."""
        held = 0
        newest_first = sorted(_states(self._aside), key=lambda one: -one[1].st_ctime_ns)
        for place, (path, state) in enumerate(newest_first):
            held += state.st_size
            if place >= most_files or (place > 0 and held > most_bytes):
                with contextlib.suppress(OSError):  # a folder that isn't empty stays
                    (os.rmdir if stat.S_ISDIR(state.st_mode) else os.unlink)(path)

    def _count(self, **counts: int) -> None:
        with self._lock:
            self._counts.update(counts)


class _Trouble:
    """``with trouble:`` lets an `OSError` end the block quietly; the first one is logged.

    That other processes are at work for long is no error.
    """

    def __init__(self, path: str) -> None:
        self._told = False
        self._path = path

    def tell(self, error: OSError) -> None:
        """Log the first error as a warning, the others as information."""
        level, self._told = logging.INFO if self._told else logging.WARNING, True
        logger.log(
            level,
            "the passage cache in %s can't be used for now, answers stay right but slower: %s",
            self._path,
            error,
        )

    def __enter__(self) -> None:
        return None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        if not isinstance(error, OSError):
            return False
        if not isinstance(error, BlockingIOError):
            self.tell(error)
        return True


def _restrict(folder: str) -> os.stat_result:
    """Close a folder of this user to others, if the file system lets us."""
    state = os.stat(folder)
    if stat.S_IMODE(state.st_mode) != 0o700 and state.st_uid == os.geteuid():
        with contextlib.suppress(OSError):  # read-only, and then nobody can write there anyway
            os.chmod(folder, 0o700)
            return os.stat(folder)
    return state


def _states(folder: str) -> list[tuple[str, os.stat_result]]:
    """The paths in a folder, and what they are; folders have no size that counts."""
    found = []
    for name in os.listdir(folder):
        path = os.path.join(folder, name)
        with contextlib.suppress(FileNotFoundError):
            found.append((path, os.stat(path, follow_symlinks=False)))
    return found


def _key_of(name: str) -> str | None:
    """The key that a file is named by; None if it is no entry's, and then it is left alone."""
    key = name.removesuffix(ENDING)
    return key if key != name and is_key(key) else None


def _is_over(expires: float | None) -> bool:
    return expires is not None and not time.time() < expires


def _reclaimed(path: str) -> bool:
    """Remove a file whose writer is dead; a living one holds the file's lock."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            if flock(descriptor):
                os.unlink(path)
                return True
        finally:
            os.close(descriptor)
    return False


def _fsync(folder: str) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        with contextlib.suppress(OSError):
            os.close(descriptor)
