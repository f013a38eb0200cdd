"""What the folder of entries holds: a SQLite database, made anew from the files when it is lost.

Only the files count, the database describes them: sizes, uses, time limits and labels. No
lookup reads it, so neither damage to it nor a process that was stopped in the midst of a change can
keep a window from being found.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sqlite3
import stat
import threading
import time
from collections.abc import Iterable, Iterator
from weakref import WeakSet

from rag_windows.threads import in_children

FORMAT = 2
"""Of the database; one of another format is made anew."""

WAIT_S = 2.0
"""Longest wait for the changes of other processes."""

_BUSY = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)

# Times are unix times.
_SCHEMA = f"""
BEGIN IMMEDIATE;
CREATE TABLE IF NOT EXISTS entries (
    key TEXT PRIMARY KEY,
    nbytes INTEGER NOT NULL,
    cost_s REAL NOT NULL,
    expires REAL,
    uses INTEGER NOT NULL,
    last_used REAL NOT NULL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS labels (
    label TEXT NOT NULL,
    key TEXT NOT NULL REFERENCES entries ON DELETE CASCADE,
    PRIMARY KEY (label, key)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS labels_of ON labels (key);
PRAGMA user_version = {FORMAT};
COMMIT;
"""


class Catalog:
    """One database, with one connection a process; none is open when the process forks.

    Attributes:
        in_line: whether this process has compared what the database holds with the files.
        uses: by key, how often and when last an entry was used since the last change.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._connection: sqlite3.Connection | None = None
        self._state = 0, 0  # of the file when it was last looked at: see `_file`
        self.in_line = False
        _catalogs.add(self)
        self.after_fork()
        in_children(self)

    def after_fork(self) -> None:
        """The parent writes what was used."""
        self._lock = threading.Lock()
        self.uses: dict[str, tuple[int, float]] = {}

    def used(self, keys: Iterable[str]) -> None:
        """Count a use of each of these; the next change writes them down."""
        now = time.time()
        with self._lock:
            for key in keys:
                self.uses[key] = (self.uses.get(key, (0, 0.0))[0] + 1, now)

    def write_uses(self) -> None:
        """Write down what was used, unless the catalog can't be used now."""
        if self.uses:
            with contextlib.suppress(OSError), self.changing():
                pass

    @contextlib.contextmanager
    def changing(self, *, lasting: bool = False) -> Iterator[sqlite3.Connection]:
        """Change the database; an error inside undoes it. `lasting` waits for the medium.

        Raises BlockingIOError if another process changes it for long, OSError if it can't be used;
        if it is damaged, the next call makes a new one.
        """
        with _using_sqlite:
            connection = self._begun(lasting)
            try:
                self._write_down(connection)
                yield connection
                connection.execute("COMMIT")
            except BaseException as error:
                self.disconnect()  # which undoes what was changed
                if isinstance(error, sqlite3.Error):
                    self._delete_if_damaged(error)
                    raise OSError(errno.EIO, f"the catalog can't be changed: {error}") from error
                raise

    def disconnect(self) -> None:
        """Close the connection; the next change opens another one."""
        with _using_sqlite:
            connection, self._connection = self._connection, None
            self.in_line = False
            if connection is not None:
                with contextlib.suppress(sqlite3.Error):
                    connection.close()

    def _write_down(self, connection: sqlite3.Connection) -> None:
        with self._lock:
            uses, self.uses = self.uses, {}
        if uses:
            connection.executemany(
                "UPDATE entries SET uses = uses + ?, last_used = max(last_used, ?) WHERE key = ?",
                [(*use, key) for key, use in uses.items()],
            )

    def _begun(self, lasting: bool) -> sqlite3.Connection:
        """A connection with a transaction begun."""
        for again in (False, True):
            try:
                connection = self._connected()
                connection.execute(f"PRAGMA synchronous = {'FULL' if lasting else 'NORMAL'}")
                connection.execute("BEGIN IMMEDIATE")
            except sqlite3.Error as error:
                if _code(error) in _BUSY:
                    raise BlockingIOError(errno.EAGAIN, "another process changes it") from error
                self.disconnect()
                if not self._delete_if_damaged(error) or again:
                    raise OSError(errno.EIO, f"the catalog can't be used: {error}") from error
            else:
                break
        return connection

    def _connected(self) -> sqlite3.Connection:
        """The connection to the file that has the database's name now."""
        before, self._state = self._state, self._file()
        if self._connection is not None and before[0] == self._state[0]:
            if self._state[1] < before[1]:
                raise sqlite3.DatabaseError("the file became shorter")  # it never shrinks
            return self._connection
        self.disconnect()
        connection = sqlite3.connect(
            self._path, timeout=WAIT_S, isolation_level=None, check_same_thread=False
        )
        try:
            connection.execute("PRAGMA mmap_size = 0")  # what is mapped can be truncated
            connection.execute("PRAGMA foreign_keys = ON")
            with contextlib.suppress(sqlite3.OperationalError):
                connection.execute("PRAGMA journal_mode = WAL")  # not on every file system
            self._state = self._file()
            if connection.execute("PRAGMA quick_check(1)").fetchone() != ("ok",):
                raise sqlite3.DatabaseError("its pages are inconsistent")
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            if version == 0:
                connection.executescript(_SCHEMA)
            elif version != FORMAT:
                raise sqlite3.DatabaseError(f"it has format {version}, not {FORMAT}")
        except BaseException:
            connection.close()
            raise
        self._connection = connection
        return connection

    def _file(self) -> tuple[int, int]:
        """The number of the database's file, 0 if there is none, and its size."""
        try:
            found = os.stat(self._path, follow_symlinks=False)
        except FileNotFoundError:
            return 0, 0
        if not stat.S_ISREG(found.st_mode):
            self._state = found.st_ino, 0
            raise sqlite3.DatabaseError("it is not a regular file")
        return found.st_ino, found.st_size

    def _delete_if_damaged(self, error: sqlite3.Error) -> bool:
        """Whether the database is damaged (a missing table is damage, too): then it is deleted."""
        unable = isinstance(error, sqlite3.OperationalError)
        if unable and _code(error) not in (None, sqlite3.SQLITE_ERROR):
            return False  # the system could not read or write it
        with contextlib.suppress(OSError):
            if os.stat(self._path, follow_symlinks=False).st_ino == self._state[0]:
                for ending in ("", "-wal", "-shm", "-journal"):
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(self._path + ending)
        return True


def _code(error: sqlite3.Error) -> int | None:
    """SQLite's number of an error, without its finer part."""
    code = getattr(error, "sqlite_errorcode", None)
    return None if code is None else int(code) & 0xFF


# A fork copies SQLite's own locks and its notes on files that are open, which would be wrong in the
# child: so no connection is open then, and no thread inside SQLite.
_using_sqlite = threading.RLock()
_catalogs: WeakSet[Catalog] = WeakSet()


def _before_fork() -> None:
    _using_sqlite.acquire()
    for catalog in list(_catalogs):
        catalog.disconnect()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_before_fork,
        after_in_parent=_using_sqlite.release,
        after_in_child=_using_sqlite.release,
    )
