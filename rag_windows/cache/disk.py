"""The tier on disk: entries as files that several processes share."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import secrets
import sqlite3
import stat
import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal
from weakref import finalize

import torch

from rag_windows.cache.catalog import Catalog
from rag_windows.cache.codec import EXACT, Entry
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
from rag_windows.cache.locks import FileLock, lock_file, require_locks
from rag_windows.cache.tier import Outcome, Tier
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

Found = Literal["read", "missing", "expired", "quarantined", "failed"]
"""What came of reading an entry."""


class DiskTier(Tier):
    """Entries in a folder, under a limit in bytes, for all processes of one user.

    What goes wrong with the disk is logged as a warning the first time. Files that can't be proved
    right are put aside under ``quarantine``. Lookups read the files alone; what else is known of
    them is in the `Catalog`, and what is done to both is done in one of its changes, files first,
    by one process at a time. A process that dies on the way leaves rows without files or files
    without rows, and the next one to open the folder finds them.

    Args:
        path: the folder; made if it is missing. Nothing outside it is touched.
        limit_bytes: most bytes of all files, one being written and those put aside included; the
            catalog's few hundred bytes an entry come on top.
        store: name of the stored form; entries of other forms are not found.

    Raises:
        InputError: for a form that doesn't exist or a negative limit.
        CacheError: if `path` is no folder, or other users can write in it, or the system has no
            file locks.
    """

    def __init__(self, path: str | os.PathLike[str], limit_bytes: int, store: str = EXACT) -> None:
        require_locks()
        super().__init__(limit_bytes, store)
        self.path = os.path.abspath(os.path.expanduser(os.fspath(path)))
        folders = "entries", "locks", "quarantine", "catalog"
        self._folders = tuple(os.path.join(self.path, name) for name in folders)
        self._entries, self._locks, self._aside, catalog = self._folders
        self._catalog = Catalog(os.path.join(catalog, "windows.sqlite"))
        self._told = self._closed = False
        self._usable = True
        self._seen = 0  # the catalog's version that the policy knows
        finalize(self, Catalog.write_uses, self._catalog)
        with self._trouble():
            self._prepare()
            with self._changing():
                pass  # brings catalog and files in line

    # Reading

    def _look(self, keys: Sequence[str]) -> dict[str, Entry]:
        """Read entries; large ones by several threads, as digests and reads run outside the GIL."""
        found: dict[str, Entry] = {}
        for place, key in enumerate(keys):
            entry, _ = self._read(key)
            rest = keys[place + 1 :]
            if entry is None:
                continue
            found[key] = entry
            if entry.nbytes * len(rest) > _WORTH_THREADS_BYTES:
                rooms = [self._room(other) for other in rest]
                count = min(_MOST_THREADS, os.cpu_count() or 1, len(rest))
                with ThreadPoolExecutor(count, "rag-windows-cache") as pool:
                    read = zip(rest, pool.map(self._read, rest, rooms), strict=True)
                    found |= {other: one for other, (one, _) in read if one is not None}
                break
        self._catalog.used(found)
        return found

    def _read(self, key: str, room: torch.Tensor | None = None) -> tuple[Entry | None, Found]:
        """Read one entry, into `room` if there is any, and prove all of it; what is wrong goes.

        This is on the way to an answer, so the catalog is left for the next change.
        """
        outcome: Found = "missing"
        with self._trouble():
            if not self._usable:
                return None, outcome
            try:
                with opened(self._path(key), key) as file:
                    file.require_current(time.time())
                    return read_entry(file, self._store, room), "read"
            except FileNotFoundError:
                return None, outcome
            except OutdatedError:
                outcome = "expired" if self._unlink(key) else outcome
            except FormatError as error:
                outcome = "quarantined" if self._put_aside(key, error.inode) else outcome
            except OSError:
                outcome = "failed"
                raise
        if outcome != "missing":
            self._count(**{outcome: 1})
        if outcome != "failed":
            self._forget([key])
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

    def verify(self) -> tuple[int, int]:
        """Read every entry, and put aside those that can't be proved right: how many of each."""
        outcomes = Counter(self._read(key)[1] for key in self._keys())
        return outcomes.total() - outcomes["missing"], outcomes["quarantined"]

    def __contains__(self, key: str) -> bool:
        """Whether a file of that name is there; only reading proves it right."""
        return self._usable and os.path.lexists(self._path(check_key(key)))

    def _holds(self) -> tuple[int, int]:
        sizes: list[int] = []
        with self._trouble():
            if self._usable:
                sizes = [size for path, size, _ in _files(self._entries) if _key_of(path)]
        return len(sizes), sum(sizes)

    @property
    def many_uses(self) -> bool:
        """Whether there are enough uses that `write_uses` should write them."""
        return len(self._catalog.uses) >= USES_TOGETHER

    def write_uses(self) -> None:
        """Write into the catalog which entries were used; never on the way to an answer."""
        self._catalog.write_uses()

    # Writing

    def _put(self, key: str, entry: Entry) -> Outcome:
        outcome: Outcome = "failed"
        with self._trouble():
            try:
                if not self._closed:
                    self._prepare()
                    image = image_of(key, entry, self._store)
                    outcome = "stored" if self._write(key, entry, image) else "refused"
            except (BlockingIOError, CacheError):
                outcome = "refused"
        return outcome

    def _write(self, key: str, entry: Entry, image: Sequence[memoryview]) -> bool:
        """Write a file; whole or not at all. False if it is not worth its room."""
        path, size = self._path(key), sum(part.nbytes for part in image)
        writing = os.path.join(self._entries, f"{key}.{secrets.token_hex(8)}.tmp")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        left: list[str] = []
        try:
            with self._changing() as rows:
                if not self._make_room(rows, key, size, entry.cost_s):
                    return False
                left = [writing]
                with _open(writing, flags) as descriptor:
                    write_image(descriptor, image)
                left.append(path)
                os.rename(writing, path)
                with _open(self._entries, os.O_RDONLY | os.O_DIRECTORY) as descriptor:
                    os.fsync(descriptor)
                _insert(rows, key, size, entry.cost_s, entry.expires, time.time(), entry.labels)
            left.clear()
        finally:
            for one in left:
                self._forget([key])
                with contextlib.suppress(OSError):
                    os.unlink(one)
        return True

    def _make_room(self, rows: sqlite3.Connection, key: str, size: int, cost_s: float) -> bool:
        """Drop what is worth less than an entry, and the present one of its key.

        Returns:
            False if it is not worth what would have to go, or doesn't fit.
        """
        if _version(rows) != self._seen and _held(rows) + size > self._limit_bytes:
            self._sync(rows)
        for _ in range(2):
            with self._lock:
                victims = self._policy.admit(key, size, cost_s)
            if victims is None:
                return False
            self._evict(rows, victims)
            self._unlink(key)
            _delete(rows, [key])
            aside = sum(one for _, one, _ in _files(self._aside))
            if _held(rows) + aside + size <= self._limit_bytes:
                return True
            # Others have written, or files put aside take the room.
            self._forget([key])
            self._trim_aside(0, 0)
            self._sync(rows)
        return False

    def _evict(self, rows: sqlite3.Connection, keys: Collection[str]) -> None:
        for key in keys:
            self._unlink(key)
        _delete(rows, keys)
        self._count(evictions=len(keys))

    # Labels

    def add_labels(self, key: str, labels: Collection[str]) -> None:
        """Give an entry more labels, as far as it may have so many; its file stays as it is."""
        with self._trouble(), self._changing(lasting=True) as rows:
            held = _labels(rows, key)
            missing = [label for label in dict.fromkeys(labels) if label not in held]
            missing = missing[: max(0, MOST_LABELS - len(held))]
            if missing and rows.execute("SELECT 1 FROM entries WHERE key = ?", (key,)).fetchone():
                with contextlib.suppress(FileNotFoundError):
                    os.chmod(self._path(key), _MORE_LABELS_MODE)
                pairs = [(label, key) for label in missing]
                rows.executemany("INSERT INTO labels VALUES (?, ?)", pairs)

    def labels(self, keys: Sequence[str]) -> dict[str, set[str]]:
        """The labels of entries, as far as they are known; never on the way to an answer."""
        with self._trouble(), self._changing() as rows:
            return {key: _labels(rows, key) for key in keys}
        return {}

    def keys_with(self, labels: Collection[str]) -> list[str]:
        """Keys of the entries that carry any of the labels.

        Where the catalog can't be used, the files are read: those that may carry more labels than
        they hold are named, too.
        """
        statement = "SELECT key FROM labels WHERE label = ?"
        with self._trouble(), self._changing() as rows:
            named = {key for label in labels for (key,) in rows.execute(statement, (label,))}
            return [key for key in sorted(named) if is_key(key) and key in self]
        found = []
        for key in self._keys():
            with contextlib.suppress(OSError, FormatError), opened(self._path(key), key) as file:
                if file.more_labels or not set(labels).isdisjoint(file.note.labels):
                    found.append(key)
        return found

    # Forgetting

    def _late(self, now: float) -> list[str]:
        """What has expired or is of an older version; what is too much or without an owner goes."""
        late: list[str] = []
        with self._trouble():
            with self._changing() as rows:
                self._sync(rows)
                found = rows.execute("SELECT key FROM entries WHERE expires <= ?", (now,))
                late = [key for (key,) in found if is_key(key)]
            for name in os.listdir(self._locks):
                with contextlib.suppress(OSError):  # what can't be locked is no lock of ours
                    lock = lock_file(Path(self._locks, name))
                    if lock is not None:
                        lock.release()  # a dead holder's file goes with it
        return late

    def clear(self) -> None:
        """Drop all entries, those being written and the files put aside."""
        with self._trouble():
            try:
                with self._changing() as rows:
                    rows.execute("DELETE FROM entries")
                    self._unlink_all()
                    with self._lock:
                        self._policy.clear()
            except OSError:
                self._unlink_all()
                raise

    def _drop(self, keys: Sequence[str]) -> int:
        """Drop entries; without the catalog if it is not to be had: what shall go must go."""
        dropped = 0
        with self._trouble():
            try:
                if keys and self._usable:
                    with self._changing() as rows:
                        dropped = sum(map(self._unlink, keys))
                        _delete(rows, keys)
            except OSError:
                dropped += sum(map(self._unlink, keys))
                raise
            finally:
                self._forget(keys)
        return dropped

    def _unlink(self, key: str) -> bool:
        """Remove an entry's file; False if there was none."""
        try:
            os.unlink(self._path(key))
        except (FileNotFoundError, IsADirectoryError):
            return False
        return True

    def _unlink_all(self) -> None:
        for name in os.listdir(self._entries) if self._usable else ():
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
        with self._trouble():
            if self._usable:
                return lock_file(Path(self._locks, key))
        return FileLock()

    # The folder and its catalog

    def close(self) -> None:
        """Write down the uses and stop using the folder."""
        self.write_uses()
        self._closed, self._usable = True, False
        self._catalog.disconnect()

    def _prepare(self) -> None:
        """Make the folders that are missing, for this user only."""
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
    def _changing(self, *, lasting: bool = False) -> Iterator[sqlite3.Connection]:
        """Change catalog and files together."""
        if not self._usable:
            raise BlockingIOError(errno.EAGAIN, "the folder is not in use")
        with self._catalog.changing(lasting=lasting) as rows:
            if not self._catalog.in_line:
                self._sync(rows)
            yield rows
            self._catalog.in_line = True

    def _sync(self, rows: sqlite3.Connection) -> None:
        """Bring catalog, files and policy in line.

        What dead writers left goes, and so does what is too much.
        """
        files: set[str] = set()
        for name in os.listdir(self._entries):
            key = _key_of(name)
            if key is not None:
                files.add(key)
            elif _WRITING.fullmatch(name):  # who writes is inside a change, and we are
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(os.path.join(self._entries, name))
        known = {key for (key,) in rows.execute("SELECT key FROM entries")}
        _delete(rows, known - files)
        for key in files - known:
            self._adopt(rows, key)
        statement = "SELECT key, nbytes, cost_s, uses FROM entries ORDER BY last_used, key"
        held = list(rows.execute(statement))
        if not all(is_key(key) and isinstance(size, int) for key, size, *_ in held):
            raise sqlite3.DatabaseError("it holds what nobody has put there")
        with self._lock:
            victims = self._policy.sync(held)
        self._evict(rows, victims)
        aside = sum(size for _, size, _ in _files(self._aside))
        if _held(rows) + aside > self._limit_bytes:
            self._trim_aside(0, 0)
        self._seen = _version(rows)

    def _adopt(self, rows: sqlite3.Connection, key: str) -> None:
        """Note an entry whose file the catalog does not know."""
        path = self._path(key)
        try:
            with opened(path, key) as file:
                note, state = file.note, file.state
                used = min(state.st_mtime, time.time())
                if file.more_labels:
                    self._unlink(key)  # nobody knows under which ids it is to be found
                else:
                    size = state.st_size
                    _insert(rows, key, size, note.cost_s, note.expires, used, note.labels)
        except OutdatedError:
            _insert(rows, key, os.stat(path, follow_symlinks=False).st_size, 0.0, 0.0, 0.0, ())
        except FormatError as error:
            self._count(quarantined=self._put_aside(key, error.inode))
        except OSError:
            return  # reading will tell

    def _path(self, key: str) -> str:
        return os.path.join(self._entries, key + ENDING)

    def _keys(self) -> list[str]:
        with self._trouble():
            if self._usable:
                return [key for name in os.listdir(self._entries) if (key := _key_of(name))]
        return []

    # Files put aside

    def _put_aside(self, key: str, inode: int | None) -> bool:
        """Move an entry's file out of readers' sight, unless its name stands for another by now.

        Links and folders move as they are. Returns whether it was there and moved.
        """
        path = self._path(key)
        try:
            if inode is not None and os.stat(path, follow_symlinks=False).st_ino != inode:
                return False
            os.rename(path, os.path.join(self._aside, f"{key}.{secrets.token_hex(8)}.bad"))
        except FileNotFoundError:
            return False
        self._trim_aside(self._limit_bytes // _ASIDE_SHARE, _MOST_ASIDE)
        return True

    def _trim_aside(self, most_bytes: int, most_files: int) -> None:
        """Remove files put aside, the oldest first; one may be larger than all may be."""
        held = 0
        newest_first = sorted(_files(self._aside), key=lambda one: -one[2])
        for place, (path, size, _) in enumerate(newest_first if self._usable else ()):
            held += size
            if place >= most_files or (place > 0 and held > most_bytes):
                with contextlib.suppress(OSError):  # a folder that isn't empty stays
                    try:
                        os.unlink(path)
                    except IsADirectoryError:
                        os.rmdir(path)

    @contextlib.contextmanager
    def _trouble(self) -> Iterator[None]:
        """Let an `OSError` end what is inside quietly; the first one is logged as a warning.

        That other processes are at work for long is no error.
        """
        try:
            yield
        except BlockingIOError:
            return
        except OSError as error:
            level, self._told = logging.INFO if self._told else logging.WARNING, True
            logger.log(
                level,
                "the passage cache in %s can't be used for now, answers stay right but slower: %s",
                self.path,
                error,
            )


def _insert(
    rows: sqlite3.Connection,
    key: str,
    nbytes: int,
    cost_s: float,
    expires: float | None,
    used: float,
    labels: Sequence[str],
) -> None:
    row = key, nbytes, cost_s, expires, 1, used
    rows.execute("INSERT OR REPLACE INTO entries VALUES (?, ?, ?, ?, ?, ?)", row)
    pairs = [(label, key) for label in labels]
    rows.executemany("INSERT OR IGNORE INTO labels VALUES (?, ?)", pairs)


def _delete(rows: sqlite3.Connection, keys: Collection[str]) -> None:
    rows.executemany("DELETE FROM entries WHERE key = ?", [(key,) for key in keys])


def _labels(rows: sqlite3.Connection, key: str) -> set[str]:
    return {label for (label,) in rows.execute("SELECT label FROM labels WHERE key = ?", (key,))}


def _held(rows: sqlite3.Connection) -> int:
    """Bytes of all entries."""
    return int(rows.execute("SELECT total(nbytes) FROM entries").fetchone()[0])


def _version(rows: sqlite3.Connection) -> int:
    """Another number whenever another connection has changed something."""
    return int(rows.execute("PRAGMA data_version").fetchone()[0])


@contextlib.contextmanager
def _open(path: str, flags: int) -> Iterator[int]:
    descriptor = os.open(path, flags | os.O_CLOEXEC, _FILE_MODE)
    try:
        yield descriptor
    finally:
        with contextlib.suppress(OSError):
            os.close(descriptor)


def _restrict(folder: str) -> os.stat_result:
    """Close a folder of this user to others, if the file system lets us."""
    state = os.stat(folder)
    if stat.S_IMODE(state.st_mode) != 0o700 and state.st_uid == os.geteuid():
        with contextlib.suppress(OSError):  # read-only, and then nobody can write there anyway
            os.chmod(folder, 0o700)
            return os.stat(folder)
    return state


def _files(folder: str) -> list[tuple[str, int, int]]:
    """What is in a folder: path, bytes, and when it came there; folders take none."""
    found = []
    for name in os.listdir(folder):
        path = os.path.join(folder, name)
        with contextlib.suppress(FileNotFoundError):
            state = os.stat(path, follow_symlinks=False)
            found.append(
                (path, 0 if stat.S_ISDIR(state.st_mode) else state.st_size, state.st_ctime_ns)
            )
    return found


def _key_of(path: str) -> str | None:
    """The key that a file is named by; None if it is no entry's, and then it is left alone."""
    key, ending = os.path.splitext(os.path.basename(path))
    return key if ending == ENDING and is_key(key) else None
