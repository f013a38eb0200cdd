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
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import NamedTuple
from weakref import finalize

import torch

from rag_windows import threads
from rag_windows.cache.catalog import WAIT_S, Catalog, CatalogError, Row, Rows
from rag_windows.cache.codec import Entry, codec_named
from rag_windows.cache.counters import TierStats
from rag_windows.cache.entry_file import (
    DIGESTS,
    ENDING,
    FormatError,
    Image,
    Note,
    OutdatedError,
    WrongFileError,
    image_of,
    opened,
    read_entry,
    room_for,
    write_image,
)
from rag_windows.cache.keys import check_key, is_key
from rag_windows.cache.locks import FileLock, flock, is_locked, lock_file, require_locks
from rag_windows.cache.policy import Policy
from rag_windows.errors import CacheError, InputError

logger = logging.getLogger(__name__)

MOST_LABELS = 16
"""Ids that one entry may carry: windows of equal text are one entry, whatever their ids."""

USES_TOGETHER = 512
"""Uses that are written into the catalog together."""

_ENTRIES, _LOCKS, _QUARANTINE, _CATALOG = "entries", "locks", "quarantine", "catalog"
_FOLDERS = (_ENTRIES, _LOCKS, _QUARANTINE, _CATALOG)
_WRITING = re.compile(r"[0-9a-f]{64}\.([0-9]{1,19}\.)?[0-9a-f]{16}\.tmp")

_ASIDE_SHARE, _MOST_ASIDE = 16, 64
"""Files put aside take at most one of so many parts of the limit, and are at most so many."""

_WORTH_THREADS_BYTES = 1 << 22  # below, starting threads takes longer than it saves
_MOST_THREADS = 8

_FILE_MODE, _MORE_LABELS_MODE = 0o600, 0o400
"""A file that can't be written has labels that only the catalog holds: without them it goes."""


class Verified(NamedTuple):
    """How many entries were read, and how many of them were put aside."""

    checked: int
    quarantined: int


@dataclass(eq=False, slots=True)
class _Folders:
    """Descriptors of the tier's folders, so that no path is walked twice.

    They are closed when nobody holds this object any more, never earlier: another thread could
    still use the number, and the system could have given it to another folder by then. There is no
    catalog where it is missing and nothing can be written.
    """

    entries: int
    locks: int
    quarantine: int
    catalog: int | None

    def __del__(self) -> None:
        for descriptor in (self.entries, self.locks, self.quarantine, self.catalog):
            try:
                if descriptor is not None:
                    os.close(descriptor)
            except (OSError, AttributeError):  # the interpreter ends, and modules are gone
                continue


@dataclass(frozen=True, slots=True)
class _Found:
    """What came of reading one entry; nothing set means that there is none.

    Attributes:
        entry: the entry, proved right.
        expired: whether it was there, but its time is up, or an older version wrote it.
        wrong: why it can't be proved right.
        error: why it can't be read, though it may be right.
    """

    entry: Entry | None = None
    expired: bool = False
    wrong: WrongFileError | None = None
    error: OSError | None = None


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
        digest: "xxh3-128" or "sha256"; proves the payload. Either is read.
        wait_s: longest wait for other processes' changes, in seconds; a write waits twice at most.
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
        clock: Callable[[], float] = time.time,
    ) -> None:
        require_locks()
        if digest not in DIGESTS:
            raise InputError(f"no digest is called {digest!r}; use one of {', '.join(DIGESTS)}.")
        self.path = os.path.abspath(os.path.expanduser(os.fspath(path)))
        self.limit_bytes = limit_bytes
        self._codec = codec_named(store)
        self._digest = digest
        self._clock = clock
        self._trouble = _Trouble(self.path)
        self._counts: Counter[str] = Counter()
        self._closed = False
        self._folders: _Folders | None = None
        self._catalog = Catalog(os.path.join(self.path, _CATALOG, "windows.sqlite"), wait_s)
        self._seen = 0  # the catalog's version that the policy knows
        self._uses = _Uses(self._catalog)
        self._finish = finalize(self, _Uses.write, self._uses)
        self.after_fork()
        threads.in_children(self)
        self._open()

    def after_fork(self) -> None:
        """A child looks into the folder before it writes there; what is counted is the parent's."""
        self._lock = threading.Lock()  # around policy, counts and gone
        self._policy = Policy(self.limit_bytes)
        self._gone: set[str] = set()  # keys whose files went without the catalog

    # Reading

    def get_many(self, keys: Sequence[str]) -> dict[str, Entry]:
        """Return the entries that are there and proved right; the other keys are missing.

        What can't be proved right, is expired or can't be read is a miss, never an error.
        """
        asked = list(dict.fromkeys(map(check_key, keys)))
        folders = self._folders
        found = {} if folders is None else self._read_many(folders, asked)
        if folders is not None:
            self._settle(folders, found)
        entries = {key: one.entry for key, one in found.items() if one.entry is not None}
        self._uses.add(entries, self._clock())
        with self._lock:
            for key in asked:
                self._policy.touch(key)
        self._count(hits=len(entries), misses=len(asked) - len(entries))
        return entries

    @property
    def many_uses(self) -> bool:
        """Whether there are enough uses that `write_uses` should write them."""
        return len(self._uses) >= USES_TOGETHER

    def write_uses(self) -> None:
        """Write into the catalog which entries were used; never on the way to an answer."""
        self._uses.write()

    def __contains__(self, key: str) -> bool:
        """Whether a file of that name is there; only reading proves it right."""
        check_key(key)
        folders = self._folders
        if folders is None:
            return False
        try:
            os.stat(key + ENDING, dir_fd=folders.entries, follow_symlinks=False)
        except OSError:
            return False
        return True

    def stats(self) -> TierStats:
        """Counters of this tier, and what the folder holds now, whoever stored it."""
        folders = self._folders
        sizes: list[int] = []
        with self._trouble:
            if folders is not None:
                names = _names(folders.entries)
                sizes = _sizes(folders.entries, [name for name in names if _key_of(name)])
        with self._lock:
            return TierStats(
                entries=len(sizes), bytes=sum(sizes), limit_bytes=self.limit_bytes, **self._counts
            )

    def verify(self) -> Verified:
        """Read every entry and put aside what can't be proved right; counts no uses."""
        folders = self._folders
        checked = quarantined = 0
        for key in self._keys():
            if folders is not None:
                one = self._read(folders, key)
                checked += one != _Found()
                quarantined += self._settle(folders, {key: one})
        return Verified(checked, quarantined)

    def _read_many(self, folders: _Folders, keys: Sequence[str]) -> dict[str, _Found]:
        """Read entries; large ones by several threads, as digests and reads run outside the GIL."""
        found: dict[str, _Found] = {}
        for place, key in enumerate(keys):
            found[key] = one = self._read(folders, key)
            rest = keys[place + 1 :]
            if one.entry is not None and one.entry.nbytes * len(rest) > _WORTH_THREADS_BYTES:
                threads = min(_MOST_THREADS, os.cpu_count() or 1, len(rest))
                with ThreadPoolExecutor(threads, "rag-windows-cache") as pool:
                    begun = {
                        key: pool.submit(self._read, folders, key, room_for(folders.entries, key))
                        for key in rest
                    }
                    found.update({key: reading.result() for key, reading in begun.items()})
                break
        return found

    def _read(self, folders: _Folders, key: str, room: torch.Tensor | None = None) -> _Found:
        """Read one entry, into `room` if there is any, and prove all of it."""
        try:
            with opened(folders.entries, key) as file:
                if file.note.expired(self._clock()):
                    return _Found(expired=True)
                return _Found(read_entry(file, self._codec, room))
        except FileNotFoundError:
            return _Found()
        except OutdatedError:
            return _Found(expired=True)
        except WrongFileError as error:
            return _Found(wrong=error)
        except OSError as error:
            return _Found(error=error)

    def _settle(self, folders: _Folders, found: dict[str, _Found]) -> int:
        """Do what reading called for; returns how many files were put aside.

        This is on the way to an answer, so the catalog is left for the next change.
        """
        aside = 0
        for key, one in found.items():
            with self._trouble:
                if one.error is not None:
                    self._count(failed=1)
                    self._trouble.tell(one.error)
                elif one.expired:
                    self._count(expired=self._unlink(folders, key))
                elif one.wrong is not None and self._put_aside(folders, key, one.wrong.inode):
                    self._count(quarantined=1)
                    aside += 1
            if one.expired or one.wrong is not None:
                self._forget([key])
        return aside

    # Writing

    def put(self, key: str, entry: Entry) -> bool:
        """Write an entry in place of the key's present one; False if it isn't there afterwards.

        Raises:
            CacheError: for a key that is none, or keys or values that are NaN or infinite.
        """
        check_key(key)
        try:
            image = image_of(key, entry, self._codec, self._digest)
        except FormatError:
            self._count(refused=1)
            return False
        for again in (False, True):
            folders = self._folders or self._open()
            if folders is None:
                break
            try:
                stored = self._write(folders, key, entry, image)
            except BlockingIOError:
                stored = False
            except FileNotFoundError as error:
                if again:
                    self._trouble.tell(error)
                else:
                    self._folders = None  # somebody removed the folders; once more with new ones
                continue
            except OSError as error:
                self._trouble.tell(error)
                break
            self._count(**{"stored" if stored else "refused": 1})
            return stored
        self._count(failed=1)
        return False

    def add_labels(self, key: str, labels: Collection[str]) -> None:
        """Give an entry more labels, as far as it may have so many; its file stays as it is."""
        folders = self._folders
        with self._trouble:
            if folders is None:
                return
            with self._changing(folders, lasting=True) as rows:
                held = rows.labels(key)
                room = max(0, MOST_LABELS - len(held))
                missing = [label for label in dict.fromkeys(labels) if label not in held][:room]
                if missing and rows.writing(key) is not None:
                    with contextlib.suppress(FileNotFoundError):
                        os.chmod(key + ENDING, _MORE_LABELS_MODE, dir_fd=folders.entries)
                    rows.add_labels(key, missing)

    def with_more_labels(self, keys: Iterable[str]) -> list[str]:
        """Those of some entries that may have more labels than their files hold."""
        folders = self._folders
        found: list[str] = []
        if folders is None:
            return found
        for key in keys:
            with contextlib.suppress(OSError):
                state = os.stat(key + ENDING, dir_fd=folders.entries, follow_symlinks=False)
                if _has_more_labels(state):
                    found.append(key)
        return found

    def labels(self, keys: Iterable[str]) -> dict[str, set[str]]:
        """The labels of entries, as far as they are known; never on the way to an answer."""
        folders = self._folders
        with self._trouble:
            if folders is not None:
                with self._changing(folders) as rows:
                    return {key: rows.labels(key) for key in keys}
        return {}

    def _write(self, folders: _Folders, key: str, entry: Entry, image: Image) -> bool:
        """Write a file; whole or not at all. False if it is refused.

        Raises:
            BlockingIOError: other processes' changes did not end in time.
            OSError: if the system can't; the entry isn't there then.
        """
        name = f"{key}.{secrets.token_hex(8)}.tmp"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        row = Row(key, image.nbytes, entry.cost_s, entry.expires, 1, self._clock(), name)
        descriptor = None
        shown = done = False
        try:
            with self._changing(folders) as rows:
                self._uses.write_into(rows)
                if not self._make_room(folders, rows, row):
                    return False
                rows.put(row, entry.labels)
                descriptor = os.open(name, flags, _FILE_MODE, dir_fd=folders.entries)
                flock(descriptor)  # as long as it is held, the file has a living writer
            write_image(descriptor, image)
            with self._changing(folders) as rows:
                if rows.writing(key) != (name,):
                    return False  # taken away meanwhile, to make room or to clear the cache
                shown = True
                if not _renamed(folders, name, key + ENDING):
                    return False
                rows.written(key)
            os.fsync(folders.entries)
            done = True
        finally:
            if descriptor is not None:
                if not done:
                    self._forget([key], later=True)
                    for left in (name, key + ENDING) if shown else (name,):
                        with contextlib.suppress(OSError):
                            os.unlink(left, dir_fd=folders.entries)
                with contextlib.suppress(OSError):
                    os.close(descriptor)
        return True

    def _make_room(self, folders: _Folders, rows: Rows, wanted: Row) -> bool:
        """Drop what is worth less than an entry, and the present one of its key.

        Returns:
            False if it is not worth what would have to go, or doesn't fit.
        """
        key, nbytes = wanted.key, wanted.nbytes
        if rows.version != self._seen and rows.nbytes + nbytes > self.limit_bytes:
            self._sync(folders, rows)
        for _ in range(2):
            with self._lock:
                victims = self._policy.admit(key, nbytes, wanted.cost_s)
            if victims is None:
                return False
            self._evict(folders, rows, victims)
            self._unlink(folders, key)
            rows.remove([key])
            if rows.nbytes + self._aside_bytes(folders) + nbytes <= self.limit_bytes:
                return True
            # Others have written, or files put aside take the room.
            self._trim_aside(folders, 0, keep=0)
            with self._lock:
                self._policy.forget(key)
            self._sync(folders, rows)
        return False

    def _evict(self, folders: _Folders, rows: Rows, keys: Collection[str]) -> None:
        for key in keys:
            self._unlink(folders, key)
        rows.remove(keys)
        self._count(evictions=len(keys))

    # Forgetting

    def keys_with(self, labels: Collection[str]) -> list[str]:
        """Keys of the entries that carry any of the labels.

        Where the catalog can't be used, the files are read: those that may carry more labels than
        they hold are named, too.
        """
        folders = self._folders
        if folders is None:
            return []
        with self._trouble, self._changing(folders) as rows:
            return [key for key in rows.labelled(labels) if is_key(key)]
        found = []
        for key in self._keys():
            with contextlib.suppress(OSError, FormatError), opened(folders.entries, key) as file:
                if _has_more_labels(file.state) or not set(labels).isdisjoint(file.note.labels):
                    found.append(key)
        return found

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
        folders = self._folders
        late: list[str] = []
        with self._trouble:
            if folders is not None:
                with self._changing(folders) as rows:
                    self._sync(folders, rows)
                    late = [key for key in rows.expired(now) if is_key(key)]
                for name in _names(folders.locks):
                    with contextlib.suppress(OSError):  # what can't be locked is no lock of ours
                        lock = lock_file(name, folders.locks, transient=True)
                        if lock is not None:
                            lock.release()  # its holder had died
        dropped = self._drop(late)
        self._count(expired=dropped)
        return dropped

    def clear(self) -> None:
        """Drop all entries, those being written and the files put aside."""
        folders = self._folders
        with self._trouble:
            if folders is None:
                return
            self._unlink_all(folders)
            with self._changing(folders) as rows:
                rows.remove([row.key for row in rows.all()])
                self._unlink_all(folders)
                with self._lock:
                    self._policy.clear()

    def _drop(self, keys: Sequence[str]) -> int:
        """Drop entries; without the catalog if it is not to be had: what shall go must go."""
        folders = self._folders
        dropped = 0
        if folders is None or not keys:
            return 0
        with self._trouble:
            try:
                with self._changing(folders) as rows:
                    dropped = sum(self._unlink(folders, key) for key in keys)
                    rows.remove(keys)
            except CatalogError:
                dropped += sum(self._unlink(folders, key) for key in keys)
                self._forget(keys)
                raise
            self._forget(keys, later=False)
        return dropped

    def _forget(self, keys: Iterable[str], *, later: bool = True) -> None:
        """Entries are gone; with `later` the next change of the catalog looks after their rows."""
        with self._lock:
            for key in keys:
                self._policy.forget(key)
                if later:
                    self._gone.add(key)

    def _unlink(self, folders: _Folders, key: str) -> bool:
        """Remove an entry's file; False if there was none."""
        try:
            os.unlink(key + ENDING, dir_fd=folders.entries)
        except (FileNotFoundError, IsADirectoryError):
            return False
        return True

    def _unlink_all(self, folders: _Folders) -> None:
        for name in _names(folders.entries):
            if _key_of(name) or _is_writing(name):
                with contextlib.suppress(FileNotFoundError, IsADirectoryError):
                    os.unlink(name, dir_fd=folders.entries)
        self._trim_aside(folders, 0, keep=0)

    # Locks of keys

    def try_lock(self, key: str) -> FileLock | None:
        """Take the lock of a key; None if another living holder has it, here or elsewhere.

        Where locks don't work one that locks nothing is given: the caller encodes what others may,
        too.
        """
        check_key(key)
        folders = self._folders
        with self._trouble:
            if folders is not None:
                return lock_file(key, folders.locks, transient=True)
        return FileLock(None)

    def locked(self, key: str) -> bool:
        """Whether somebody alive holds the lock of a key."""
        check_key(key)
        folders = self._folders
        with self._trouble:
            return folders is not None and is_locked(key, folders.locks)
        return False

    # The folder and its catalog

    def close(self) -> None:
        """Stop using the folder: all that is asked for is missing from now on."""
        self.write_uses()
        self._closed = True
        self._folders = None
        self._catalog.disconnect()

    def _open(self) -> _Folders | None:
        with self._trouble:
            if not self._closed:
                self._folders = folders = _open_folders(self.path)
                with self._changing(folders):
                    pass  # a new connection brings catalog and files in line
        return self._folders

    @contextlib.contextmanager
    def _changing(self, folders: _Folders, *, lasting: bool = False) -> Iterator[Rows]:
        """Change catalog and files together.

        Raises:
            BlockingIOError: another process did not end its change in time.
            OSError: the catalog can't be used.
        """
        named = os.stat(os.path.join(self.path, _CATALOG), follow_symlinks=False)
        if folders.catalog is None or named.st_ino != os.fstat(folders.catalog).st_ino:
            raise FileNotFoundError(errno.ENOENT, "the cache's folders were replaced")
        with self._catalog.changing(lasting=lasting) as rows:
            if self._catalog.fresh:
                self._sync(folders, rows)
            with self._lock:
                gone, self._gone = self._gone, set()
            rows.remove([key for key in gone if not self._has_file(folders, rows, key)])
            yield rows
            self._catalog.fresh = False

    def _sync(self, folders: _Folders, rows: Rows) -> None:
        """Bring catalog, files and policy in line.

        What dead writers left goes, and so does what is too much.
        """
        files: set[str] = set()
        writing: set[str] = set()
        for name in _names(folders.entries):
            key = _key_of(name)
            if key is not None:
                files.add(key)
            elif _is_writing(name) and not _reclaimed(folders, name):
                writing.add(name)
        known = {row.key: row for row in rows.all()}
        rows.remove(
            key
            for key, row in known.items()
            if row.writing not in writing and (key not in files or row.writing is not None)
        )
        for key in files:
            if key not in known or known[key].writing not in (None, *writing):
                self._adopt(folders, rows, key)
        held = rows.all()
        sizes = {row.key: row.nbytes for row in held}
        with self._lock:
            victims = self._policy.sync((row.key, row.nbytes, row.cost_s, row.uses) for row in held)
        self._evict(folders, rows, [key for key in victims if is_key(key) and key in sizes])
        if rows.nbytes + self._aside_bytes(folders) > self.limit_bytes:
            self._trim_aside(folders, 0, keep=0)
        self._seen = rows.version

    def _adopt(self, folders: _Folders, rows: Rows, key: str) -> None:
        """Note an entry whose file the catalog does not know."""
        try:
            with opened(folders.entries, key) as file:
                note: Note | None = file.note
                state = file.state
        except OutdatedError:
            note, state = None, os.stat(key + ENDING, dir_fd=folders.entries, follow_symlinks=False)
        except WrongFileError as error:
            self._count(quarantined=self._put_aside(folders, key, error.inode))
            return
        except OSError:
            return  # reading will tell
        if note is None:
            rows.put(Row(key, state.st_size, 0.0, 0.0, 0, 0.0, None), ())
        elif _has_more_labels(state):
            self._unlink(folders, key)  # nobody knows any more under which ids it is to be found
        else:
            last_used = min(state.st_mtime, self._clock())
            row = Row(key, state.st_size, note.cost_s, note.expires, 1, last_used, None)
            rows.put(row, note.labels)

    def _has_file(self, folders: _Folders, rows: Rows, key: str) -> bool:
        """Whether an entry, or one that is being written, has its file."""
        found = rows.writing(key)
        for name in (key + ENDING, *(name for name in found or () if name is not None)):
            with contextlib.suppress(FileNotFoundError):
                os.stat(name, dir_fd=folders.entries, follow_symlinks=False)
                return True
        return False

    def _keys(self) -> list[str]:
        folders = self._folders
        with self._trouble:
            if folders is not None:
                return [key for name in _names(folders.entries) if (key := _key_of(name))]
        return []

    # Files put aside

    def _put_aside(self, folders: _Folders, key: str, inode: int | None) -> bool:
        """Move an entry's file out of readers' sight; links and folders move as they are.

        Args:
            folders: the tier's.
            key: the entry's.
            inode: which file was found wrong; another one of that name stays. None: whichever.

        Returns:
            Whether it was there and moved.
        """
        name, new = key + ENDING, f"{key}.{secrets.token_hex(8)}.bad"
        try:
            if inode is not None:
                state = os.stat(name, dir_fd=folders.entries, follow_symlinks=False)
                if state.st_ino != inode:
                    return False
            os.rename(name, new, src_dir_fd=folders.entries, dst_dir_fd=folders.quarantine)
        except FileNotFoundError:
            return False
        self._trim_aside(folders, self.limit_bytes // _ASIDE_SHARE, keep=1)
        return True

    def _aside_bytes(self, folders: _Folders) -> int:
        return sum(_sizes(folders.quarantine, _names(folders.quarantine)))

    def _trim_aside(self, folders: _Folders, limit_bytes: int, keep: int) -> None:
        """Remove files put aside, those that lie there longest first, until the rest is in bounds.

        Args:
            folders: the tier's.
            limit_bytes: most bytes that may stay.
            keep: so many of the last ones stay whatever their size.
        """
        listed = []
        for name in _names(folders.quarantine):
            with contextlib.suppress(FileNotFoundError):
                state = os.stat(name, dir_fd=folders.quarantine, follow_symlinks=False)
                listed.append((state.st_ctime_ns, name, state))
        held = sum(state.st_size for _, _, state in listed)
        for place, (_, name, state) in enumerate(sorted(listed, key=lambda one: one[:2])):
            left = len(listed) - place
            if left <= keep or (held <= limit_bytes and left <= _MOST_ASIDE):
                break
            with contextlib.suppress(OSError):  # a folder that isn't empty stays
                if stat.S_ISDIR(state.st_mode):
                    os.rmdir(name, dir_fd=folders.quarantine)
                else:
                    os.unlink(name, dir_fd=folders.quarantine)
                    held -= state.st_size

    def _count(self, **counts: int) -> None:
        with self._lock:
            self._counts.update(counts)


class _Uses:
    """Uses of entries that the catalog does not know of yet."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self.after_fork()
        threads.in_children(self)

    def after_fork(self) -> None:
        """What was used is for the parent to write."""
        self._lock = threading.Lock()
        self._counted: dict[str, tuple[int, float]] = {}

    def __len__(self) -> int:
        return len(self._counted)

    def add(self, keys: Iterable[str], now: float) -> None:
        """Count a use of each of these."""
        with self._lock:
            for key in keys:
                self._counted[key] = (self._counted.get(key, (0, 0.0))[0] + 1, now)

    def write(self) -> None:
        """Write them, unless the catalog can't be used now."""
        if self._counted:
            with contextlib.suppress(OSError), self._catalog.changing() as rows:
                self.write_into(rows)

    def write_into(self, rows: Rows) -> None:
        """Write them within a change."""
        with self._lock:
            counted, self._counted = self._counted, {}
        rows.count_uses(counted)


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


def _open_folders(path: str) -> _Folders:
    """Open a cache's folders, made where they are missing, for this user only.

    Raises:
        CacheError: if `path` is no folder, or a folder in it is open to other users' writing.
        OSError: if the system can't.
    """
    if not os.path.isdir(os.path.dirname(path)):
        os.makedirs(os.path.dirname(path), exist_ok=True)
    try:
        root = _open_folder(path)  # this may be a link, the user named it
    except NotADirectoryError as error:
        raise CacheError(f"the cache's path {path!r} is not a folder; name another one.") from error
    descriptors: dict[str, int] = {}
    try:
        if set(_names(root)) <= set(_FOLDERS):
            _restrict(root)  # a folder that holds other things, too, is left as it is
        for name in _FOLDERS:
            try:
                descriptors[name] = _open_folder(name, root, os.O_NOFOLLOW)
            except FileNotFoundError:
                if name != _CATALOG:
                    raise
            else:
                _require_private(descriptors[name], os.path.join(path, name))
        entries, locks, quarantine = (descriptors[name] for name in _FOLDERS[:3])
        return _Folders(entries, locks, quarantine, descriptors.get(_CATALOG))
    except BaseException:
        for descriptor in descriptors.values():
            with contextlib.suppress(OSError):
                os.close(descriptor)
        raise
    finally:
        with contextlib.suppress(OSError):
            os.close(root)


def _open_folder(name: str, inside: int | None = None, more: int = 0) -> int:
    """Open a folder, made if it is missing.

    Raises:
        FileNotFoundError: if it is missing and can't be made.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | more
    try:
        return os.open(name, flags, dir_fd=inside)
    except FileNotFoundError as error:
        try:
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, 0o700, dir_fd=inside)
        except OSError as why:
            raise FileNotFoundError(
                error.errno, f"no folder {name!r}, and none made: {why}"
            ) from why
        return os.open(name, flags, dir_fd=inside)


def _restrict(descriptor: int) -> None:
    state = os.fstat(descriptor)
    if stat.S_IMODE(state.st_mode) != 0o700 and state.st_uid == os.geteuid():
        # A read-only file system says no, and then nobody can write there anyway.
        with contextlib.suppress(OSError):
            os.fchmod(descriptor, 0o700)


def _require_private(descriptor: int, path: str) -> None:
    _restrict(descriptor)
    state = os.fstat(descriptor)
    if state.st_mode & (stat.S_IWGRP | stat.S_IWOTH) or (
        state.st_uid != os.geteuid() and os.geteuid() != 0
    ):
        raise CacheError(
            f"other users can write to {path!r}, so nothing in it can be trusted; "
            "name a folder of your own."
        )


def _names(folder: int) -> list[str]:
    # A descriptor of its own to read from: threads that list one share its position.
    own = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=folder)
    try:
        return os.listdir(own)
    finally:
        os.close(own)


def _sizes(folder: int, names: Iterable[str]) -> list[int]:
    """Bytes of the plain files and links among some names."""
    sizes = []
    for name in names:
        with contextlib.suppress(FileNotFoundError):
            state = os.stat(name, dir_fd=folder, follow_symlinks=False)
            if not stat.S_ISDIR(state.st_mode):
                sizes.append(state.st_size)
    return sizes


def _key_of(name: str) -> str | None:
    """The key that a file is named by; None if it is no entry's, and then it is left alone."""
    key = name.removesuffix(ENDING)
    return key if key != name and is_key(key) else None


def _is_writing(name: str) -> bool:
    return bool(_WRITING.fullmatch(name))


def _renamed(folders: _Folders, name: str, new: str) -> bool:
    """Rename among the entries; False if somebody took the file away."""
    try:
        os.rename(name, new, src_dir_fd=folders.entries, dst_dir_fd=folders.entries)
    except FileNotFoundError:
        return False
    return True


def _reclaimed(folders: _Folders, name: str) -> bool:
    """Remove a file whose writer is dead; a living one holds the file's lock."""
    with contextlib.suppress(OSError):
        flags = os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(name, flags, dir_fd=folders.entries)
        try:
            if flock(descriptor):
                os.unlink(name, dir_fd=folders.entries)
                return True
        finally:
            os.close(descriptor)
    return False


def _has_more_labels(state: os.stat_result) -> bool:
    return not state.st_mode & stat.S_IWUSR
