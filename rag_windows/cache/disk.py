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
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from weakref import finalize

import torch
from filelock import FileLock, Timeout

from rag_windows.cache.catalog import Catalog
from rag_windows.cache.codec import EXACT, Entry
from rag_windows.cache.entry_file import (
    ENDING,
    EntryHeader,
    FormatError,
    image_of,
    opened,
    read_entry,
    write_image,
)
from rag_windows.cache.keys import check_key, is_key
from rag_windows.cache.tier import Outcome, Tier
from rag_windows.cache.weight_sums import FOLDER as WEIGHTS
from rag_windows.errors import CacheError
from rag_windows.folders import INDEXES

logger = logging.getLogger(__name__)

MOST_LABELS = 16
"""Ids that one entry may carry: windows of equal text are one entry, whatever their ids."""

_WRITING = re.compile(r"[0-9a-f]{64}\.([0-9]{1,19}\.)?[0-9a-f]{16}\.tmp")
_WORTH_THREADS_BYTES = 1 << 22  # below, starting threads takes longer than it saves
_MOST_THREADS = 8
_FILE_MODE, _MORE_LABELS_MODE = 0o600, 0o400
"""A read-only file has labels that only the catalog holds: without these it is removed."""


class DiskTier(Tier):
    """Entries in a folder, for all processes of one user.

    Lookups read only the files; what else is known of them is in the `Catalog`. Both are changed in
    one of its transactions, files first, by one process at a time. A process that dies meanwhile
    leaves rows without files or files without rows, and the next one to open the folder repairs
    that. The first failure is logged as a warning.

    Raises:
        InputError: for a form that doesn't exist or a negative limit.
        CacheError: if `path` is no folder, or other users can write in it, or the system has no
            file locks.
    """

    def __init__(self, path: str | os.PathLike[str], limit_bytes: int, store: str = EXACT) -> None:
        require_locks()
        super().__init__(limit_bytes, store)
        self.path = os.path.abspath(os.path.expanduser(os.fspath(path)))
        folders = "entries", "locks", "catalog"
        self._folders = tuple(os.path.join(self.path, name) for name in folders)
        self._entries, self._locks, catalog = self._folders
        self._catalog = Catalog(os.path.join(catalog, "windows.sqlite"))
        self._warned = self._closed = False
        self._usable = True
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
                buffers = [self._buffer_for(other) for other in rest]
                count = min(_MOST_THREADS, os.cpu_count() or 1, len(rest))
                with ThreadPoolExecutor(count, "rag-windows-cache") as pool:
                    read = zip(rest, pool.map(self._read, rest, buffers), strict=True)
                    found |= {other: one for other, (one, _) in read if one is not None}
                break
        self._catalog.used(found)
        return found

    def _read(
        self, key: str, buffer: torch.Tensor | None = None, *, any_form: bool = False
    ) -> tuple[Entry | None, str]:
        """Read one entry, into `buffer` if there is any, and verify it; delete a damaged one."""
        outcome = "missing"
        with self._trouble():
            try:
                if not self._usable:
                    return None, outcome
                with opened(self._path(key), key) as file:
                    if not file.expired(time.time()):
                        form = file.note.codec if any_form else self._store
                        return read_entry(file, form, buffer), "read"
                outcome = "expired" if self._unlink(key) else outcome
            except FileNotFoundError:
                return None, outcome
            except FormatError as error:
                outcome = "quarantined" if self._delete_damaged(key, error) else outcome
            except OSError:
                self._count(failed=1)
                raise
        if outcome != "missing":
            self._count(**{outcome: 1})
            self._forget([key])
        return None, outcome

    def _buffer_for(self, key: str) -> torch.Tensor | None:
        """A buffer for a thread to read into: pages of its own heap would be new each time."""
        with contextlib.suppress(OSError, RuntimeError):  # no file, or no memory: reading reports
            state = os.stat(self._path(key), follow_symlinks=False)
            if stat.S_ISREG(state.st_mode):
                return torch.empty(state.st_size, dtype=torch.uint8)
        return None

    def verify(self) -> tuple[int, int]:
        """Read every entry, and delete damaged ones; returns how many of each."""
        outcomes = Counter(self._read(key, any_form=True)[1] for key in self._sizes())
        return outcomes.total() - outcomes["missing"], outcomes["quarantined"]

    def __contains__(self, key: str) -> bool:
        """Whether a file of that name is there; only reading verifies it."""
        return self._usable and os.path.lexists(self._path(check_key(key)))

    def _sizes(self) -> dict[str, int]:
        """Bytes of the files, by key."""
        found: dict[str, int] = {}
        with self._trouble():
            for name in os.listdir(self._entries) if self._usable else ():
                key = _key_of(name)
                with contextlib.suppress(FileNotFoundError):
                    if key is not None:
                        found[key] = os.stat(self._path(key), follow_symlinks=False).st_size
        return found

    def _holds(self) -> tuple[int, int]:
        sizes = self._sizes()
        return len(sizes), sum(sizes.values())

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
        """Write a file atomically; False if it is not worth its space."""
        path, size = self._path(key), sum(part.nbytes for part in image)
        writing = os.path.join(self._entries, f"{key}.{secrets.token_hex(8)}.tmp")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        left: list[str] = []
        try:
            with self._changing() as rows:
                if not self._free_space(rows, key, size, entry.cost_s):
                    return False
                left = [writing]
                with _open(writing, flags) as descriptor:
                    write_image(descriptor, image)
                left.append(path)
                os.rename(writing, path)
                with _open(self._entries, os.O_RDONLY | os.O_DIRECTORY) as descriptor:
                    os.fsync(descriptor)
                _insert(rows, key, size, entry, time.time())
            left.clear()
        finally:
            for one in left:
                self._forget([key])
                with contextlib.suppress(OSError):
                    os.unlink(one)
        return True

    def _free_space(self, rows: sqlite3.Connection, key: str, size: int, cost_s: float) -> bool:
        """Drop what is worth less than an entry, and its key's own; False if that is too little."""
        for _ in range(2):
            held, known = _held(rows), self._policy.nbytes
            if held != known and max(held, known) + size > self._limit_bytes:
                self._sync(rows)  # others have written
            with self._lock:
                victims = self._policy.admit(key, size, cost_s)
            if victims is None:
                return False
            self._evict(rows, victims)
            self._unlink(key)
            _delete(rows, [key])
            if _held(rows) + size <= self._limit_bytes:
                return True
            self._forget([key])
        return False

    def _evict(self, rows: sqlite3.Connection, keys: Collection[str]) -> None:
        for key in keys:
            self._unlink(key)
        _delete(rows, keys)
        self._count(evictions=len(keys))

    # Labels

    def add_labels(self, key: str, labels: Collection[str]) -> None:
        """Give an entry more labels, up to `MOST_LABELS`; its file stays as it is."""
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
        """The labels of entries, as far as they are known; not called while a request waits."""
        with self._trouble(), self._changing() as rows:
            return {key: _labels(rows, key) for key in keys}
        return {}

    def keys_with(self, labels: Collection[str]) -> list[str]:
        """Keys of the entries that carry any of the labels.

        Without the catalog, the files are read; entries that may have more labels are included.
        """
        statement = "SELECT key FROM labels WHERE label = ?"
        with self._trouble(), self._changing() as rows:
            named = {key for label in labels for (key,) in rows.execute(statement, (label,))}
            return [key for key in sorted(named) if is_key(key) and key in self]
        found = []
        for key in self._sizes():
            with contextlib.suppress(OSError, FormatError), opened(self._path(key), key) as file:
                if file.more_labels or not set(labels).isdisjoint(file.note.labels):
                    found.append(key)
        return found

    # Forgetting

    def _late(self, now: float) -> list[str]:
        """Keys of expired entries, after `_sync`."""
        with self._trouble(), self._changing() as rows:
            self._sync(rows)
            found = rows.execute("SELECT key FROM entries WHERE expires <= ?", (now,))
            return [key for (key,) in found if is_key(key)]
        return []

    def clear(self) -> None:
        """Drop all entries, and those being written."""
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
        """Drop entries, also where the catalog can't be used."""
        dropped = 0
        with self._trouble():
            if keys and self._usable:
                dropped = sum(map(self._unlink, keys))
                self._forget(keys)
                with self._changing() as rows:
                    dropped += sum(map(self._unlink, keys))  # written meanwhile
                    _delete(rows, keys)
        return dropped

    def _forget(self, keys: Collection[str]) -> None:
        """Note that entries were removed for another reason than the limit."""
        with self._lock:
            for key in keys:
                self._policy.forget(key)

    def _unlink(self, key: str) -> bool:
        """Remove an entry's file; False if there was none."""
        try:
            os.unlink(self._path(key))
        except (FileNotFoundError, IsADirectoryError):
            return False
        return True

    def _delete_damaged(self, key: str, error: FormatError) -> bool:
        """Delete a file unless its name is of another one by now; whether it was there."""
        with contextlib.suppress(FileNotFoundError):
            found = os.stat(self._path(key), follow_symlinks=False)
            if error.inode in (None, found.st_ino) and self._unlink(key):
                self._report(f"The passage cache deleted the damaged window {key}: {error}")
                return True
        return False

    def _unlink_all(self) -> None:
        for name in os.listdir(self._entries) if self._usable else ():
            if _key_of(name) or _WRITING.fullmatch(name):
                with contextlib.suppress(FileNotFoundError, IsADirectoryError):
                    os.unlink(os.path.join(self._entries, name))

    def try_lock(self, key: str) -> Callable[[], None] | None:
        """Take the lock of a key; None if another living holder has it, here or elsewhere.

        Returns what releases it. Where locks don't work the caller encodes what others may, too.
        """
        check_key(key)
        with self._trouble():
            if self._usable:
                return lock_file(Path(self._locks, key))
        return _release_nothing

    # The folder and its catalog

    def close(self) -> None:
        """Write down the uses and stop using the folder."""
        self._catalog.write_uses()
        self._closed, self._usable = True, False
        self._catalog.disconnect()

    def _prepare(self) -> None:
        """Make the folders that are missing, for this user only."""
        try:
            os.makedirs(self.path, mode=0o700, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            raise CacheError(
                f"The cache's path {self.path!r} is not a folder. Name a folder, or a "
                "path that does not exist yet."
            ) from error
        # A folder with other things is left as it is.
        own = {*map(os.path.basename, self._folders), WEIGHTS, INDEXES}
        if stat.S_IMODE(os.stat(self.path).st_mode) != 0o700 and {*os.listdir(self.path)} <= own:
            with contextlib.suppress(OSError):  # read-only, or another user's
                os.chmod(self.path, 0o700)
        for folder in self._folders:
            if not os.path.lexists(folder):
                with contextlib.suppress(FileExistsError):
                    os.mkdir(folder, 0o700)
            state = os.stat(folder, follow_symlinks=False)
            self._usable = stat.S_ISDIR(state.st_mode)
            if not self._usable:
                raise NotADirectoryError(errno.ENOTDIR, "not a folder of the cache", folder)
            if state.st_mode & 0o022 or os.geteuid() not in (state.st_uid, 0):
                self._usable = False
                raise CacheError(
                    f"Other users can write to {folder!r}, so nothing in it can be trusted. Name "
                    "a folder of your own, or remove their write permission."
                )

    @contextlib.contextmanager
    def _changing(self, *, lasting: bool = False) -> Iterator[sqlite3.Connection]:
        """Change catalog and files together."""
        if not self._usable:
            raise BlockingIOError(errno.EAGAIN, "the folder can't be used")
        with self._catalog.changing(lasting=lasting) as rows:
            if not self._catalog.in_line:
                self._sync(rows)
            yield rows
            self._catalog.in_line = True

    def _sync(self, rows: sqlite3.Connection) -> None:
        """Bring catalog, files and policy in line; remove surplus, and files of dead processes."""
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
            raise sqlite3.DatabaseError("it holds entries that are not valid")
        with self._lock:
            victims = self._policy.sync(held)
        self._evict(rows, victims)

    def _adopt(self, rows: sqlite3.Connection, key: str) -> None:
        """Note an entry whose file the catalog does not know."""
        try:
            with opened(self._path(key), key) as file:
                if file.more_labels:
                    self._unlink(key)  # its further ids are lost
                else:
                    used = min(file.changed, time.time())
                    _insert(rows, key, file.nbytes, file.note, used)
        except FormatError as error:
            self._count(quarantined=self._delete_damaged(key, error))
        except OSError:
            return  # reading reports it

    def _path(self, key: str) -> str:
        return os.path.join(self._entries, key + ENDING)

    @contextlib.contextmanager
    def _trouble(self) -> Iterator[None]:
        """Log an `OSError` and end what is inside; other processes that take long are no error."""
        try:
            yield
        except BlockingIOError:
            return
        except OSError as error:
            self._report(
                f"The passage cache in {self.path} can't be used for now. Answers stay right but "
                f"take longer: {error}"
            )

    def _report(self, text: str) -> None:
        """Log a warning the first time."""
        level, self._warned = logging.INFO if self._warned else logging.WARNING, True
        logger.log(level, "%s", text)


def _release_nothing() -> None:
    """Nothing was locked."""


def _insert(
    rows: sqlite3.Connection, key: str, size: int, what: Entry | EntryHeader, used: float
) -> None:
    row = key, size, what.cost_s, what.expires, 1, used
    rows.execute("INSERT OR REPLACE INTO entries VALUES (?, ?, ?, ?, ?, ?)", row)
    pairs = [(label, key) for label in what.labels]
    rows.executemany("INSERT OR IGNORE INTO labels VALUES (?, ?)", pairs)


def _delete(rows: sqlite3.Connection, keys: Collection[str]) -> None:
    rows.executemany("DELETE FROM entries WHERE key = ?", [(key,) for key in keys])


def _labels(rows: sqlite3.Connection, key: str) -> set[str]:
    return {label for (label,) in rows.execute("SELECT label FROM labels WHERE key = ?", (key,))}


def _held(rows: sqlite3.Connection) -> int:
    """Bytes of all entries."""
    return int(rows.execute("SELECT total(nbytes) FROM entries").fetchone()[0])


@contextlib.contextmanager
def _open(path: str, flags: int) -> Iterator[int]:
    descriptor = os.open(path, flags | os.O_CLOEXEC, _FILE_MODE)
    try:
        yield descriptor
    finally:
        with contextlib.suppress(OSError):
            os.close(descriptor)


def _key_of(path: str) -> str | None:
    """The key that a file is named by; None if it is no entry's and must stay."""
    key, ending = os.path.splitext(os.path.basename(path))
    return key if ending == ENDING and is_key(key) else None


LOCKS_WORK = find_spec("fcntl") is not None
"""Whether the system has POSIX file locks; Windows has none."""


def require_locks() -> None:
    """Refuse to keep windows on disk where the system has no POSIX file locks."""
    if not LOCKS_WORK:
        raise CacheError(
            "Windows can't be kept on disk: this needs POSIX file locks (Python's fcntl), which "
            "this system does not have. Keep them in memory: leave path= and disk= out."
        )


def lock_file(path: Path, wait_s: float = 0.0) -> Callable[[], None] | None:
    """Take the lock of a file, made if it is missing; None if another living holder has it.

    Returns a function that releases it and removes the file, from any thread, once. An OSError
    says that the file can't be opened or locked, or is a link.
    """
    lock = FileLock(path, wait_s, 0o600, thread_local=False, poll_interval=0.005)
    try:
        lock.acquire()
    except Timeout:
        return None

    def release() -> None:
        if lock.is_locked:
            with contextlib.suppress(OSError):
                os.unlink(path)
            with contextlib.suppress(OSError):
                lock.release()

    return release
