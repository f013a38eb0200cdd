"""What the folder of entries holds: a SQLite database, made anew from the files when it is lost.

The files are the truth, the database knows about them: sizes, uses, time limits and labels. No
lookup reads it, so neither damage to it nor a process that was stopped in the midst of a change can
keep a window from being found.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
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

_LONGEST_NAP_S = 0.01
_BUSY = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)

# Times are unix times; files of older versions expire at 0.
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
    """One database: its changes, uses that it is still to be told, what to do when it is damaged.

    A process has one connection a catalog. None is open when the process forks, and no thread is
    inside SQLite then, so that a child inherits nothing of either.

    Attributes:
        in_line: whether this process has compared what the database holds with the files.
        uses: by key, how often and when last an entry was used since the last change.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._connection: sqlite3.Connection | None = None
        self._inode = self._size = 0
        self.in_line = False
        _catalogs.add(self)
        self.after_fork()
        in_children(self)

    def after_fork(self) -> None:
        """What was used is for the parent to write."""
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
        """Change the database; what is raised inside undoes the change.

        Args:
            lasting: wait until the medium has it. Other changes may be lost with the power, and
                are then found again in the files.

        Raises:
            BlockingIOError: another process is changing it and did not end in time.
            OSError: it can't be used; if it is damaged, the next call makes a new one.
        """
        deadline = time.monotonic() + WAIT_S
        nap = 0.0002
        while True:
            # The lock is free while others are waited for: a fork must not wait with us.
            with _using_sqlite:
                connection = self._begun(lasting)
                if connection is not None:
                    with self._ending(connection):
                        self._write_down(connection)
                        yield connection
                    return
            if time.monotonic() >= deadline:
                raise BlockingIOError(errno.EAGAIN, "another process is changing the catalog")
            time.sleep(nap * random.uniform(0.5, 1.5))
            nap = min(nap * 1.5, _LONGEST_NAP_S)

    def disconnect(self) -> None:
        """Close the connection; the next change opens another one."""
        with _using_sqlite:
            connection, self._connection = self._connection, None
            self.in_line, self._size = False, 0
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

    def _begun(self, lasting: bool) -> sqlite3.Connection | None:
        """A connection in the midst of a change; None if another process is changing something."""
        for again in (False, True):
            try:
                connection = self._connected()
                connection.execute(f"PRAGMA synchronous = {'FULL' if lasting else 'NORMAL'}")
                connection.execute("BEGIN IMMEDIATE")
            except sqlite3.Error as error:
                if _code(error) in _BUSY:
                    return None
                self._give_up(error)
                if again or not _is_damage(error):
                    raise OSError(errno.EIO, f"the catalog can't be used: {error}") from error
            else:
                return connection
        return None

    @contextlib.contextmanager
    def _ending(self, connection: sqlite3.Connection) -> Iterator[None]:
        """Keep what is changed inside, or nothing of it."""
        try:
            yield
            connection.execute("COMMIT")
        except BaseException as error:
            self.in_line = False
            try:
                connection.execute("ROLLBACK")
            except sqlite3.Error:
                self.disconnect()
            if isinstance(error, sqlite3.Error):
                self._give_up(error)
                raise OSError(errno.EIO, f"the catalog can't be changed: {error}") from error
            raise

    def _connected(self) -> sqlite3.Connection:
        """The connection to the file that has the database's name now."""
        inode = self._present()
        if self._connection is not None and inode == self._inode:
            return self._connection
        self.disconnect()
        if inode is None:
            # Only this user may read it. One that is there is never opened but by SQLite: closing
            # it would let go of the locks that SQLite holds on it.
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            with contextlib.suppress(FileExistsError):
                os.close(os.open(self._path, flags, 0o600))
            inode = self._present()
        self._inode = inode or 0
        connection = sqlite3.connect(
            self._path, timeout=0.0, isolation_level=None, check_same_thread=False
        )
        try:
            connection.execute("PRAGMA mmap_size = 0")  # what is mapped can be truncated
            connection.execute("PRAGMA foreign_keys = ON")
            with contextlib.suppress(sqlite3.OperationalError):
                connection.execute("PRAGMA journal_mode = WAL")  # not on every file system
            if connection.execute("PRAGMA quick_check(1)").fetchone() != ("ok",):
                raise sqlite3.DatabaseError("its pages do not fit together")
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            if version == 0:
                connection.executescript(_SCHEMA)
            elif version != FORMAT:
                raise sqlite3.DatabaseError(f"it has format {version}, not {FORMAT}")
            self._size = os.stat(self._path, follow_symlinks=False).st_size  # it never shrinks
        except BaseException:
            with contextlib.suppress(sqlite3.Error):
                connection.close()
            raise
        self._connection = connection
        return connection

    def _present(self) -> int | None:
        """The file's number on its device; None if there is none."""
        try:
            state = os.stat(self._path, follow_symlinks=False)
        except FileNotFoundError:
            return None
        if not stat.S_ISREG(state.st_mode):
            self._inode = state.st_ino
            raise sqlite3.DatabaseError("it is no plain file")
        if self._connection is not None and state.st_size < self._size:
            raise sqlite3.DatabaseError("it was cut")
        return state.st_ino

    def _give_up(self, error: sqlite3.Error) -> None:
        """Let a connection go that failed, and the database if it is damaged."""
        self.disconnect()
        if not _is_damage(error):
            return
        with contextlib.suppress(OSError):
            # Unless another process has made a new one already.
            if os.stat(self._path, follow_symlinks=False).st_ino == self._inode:
                for ending in ("", "-wal", "-shm", "-journal"):
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(self._path + ending)


def _code(error: sqlite3.Error) -> int | None:
    """SQLite's number of an error, without its finer part."""
    code = getattr(error, "sqlite_errorcode", None)
    return None if code is None else int(code) & 0xFF


def _is_damage(error: sqlite3.Error) -> bool:
    """Whether the database's content is wrong, rather than the system unable to read or write it.

    A missing table is damage, too, and so is text that can't be decoded, which has no number.
    """
    unable = isinstance(error, sqlite3.OperationalError)
    return not unable or _code(error) in (None, sqlite3.SQLITE_ERROR)


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
