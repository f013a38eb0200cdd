"""The calls of the operating system that the disk tier makes, one method each.

Everything the tier does to files goes through one such object, so that a test can let any call
fail, or end the process there, without touching ``os``.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from rag_windows.errors import CacheError

try:
    import fcntl
except ImportError:  # Windows
    LOCKS_WORK = False
else:
    LOCKS_WORK = True
    _OPEN = os.O_CLOEXEC | os.O_NOFOLLOW


def require_locks() -> None:
    """Refuse to keep windows on disk where the system has no POSIX file locks.

    Raises:
        CacheError: saying so, and what works instead.
    """
    if not LOCKS_WORK:
        raise CacheError(
            "Keeping windows on disk needs POSIX file locks (Python's fcntl), which this system "
            "does not have; keep them in memory instead: leave path= and disk= out."
        )


@dataclass(frozen=True, slots=True)
class FileState:
    """What the file system says about a file.

    Attributes:
        mode: kind and permissions.
        inode: its number on its device.
        size: bytes.
        modified_ns: unix time in nanoseconds; the tier keeps usage there, see `usage`.
        changed_ns: unix time in nanoseconds of the last change, a move included.
        owner: user id.
    """

    mode: int
    inode: int
    size: int
    modified_ns: int
    changed_ns: int
    owner: int


class Files:
    """Plain calls; every one may raise `OSError`. Names are single components, never paths."""

    def make_root(self, path: str) -> None:
        """Make a folder for this user only, and missing folders above it."""
        above = os.path.dirname(path)
        if above and not os.path.isdir(above):
            os.makedirs(above, exist_ok=True)
        os.mkdir(path, 0o700)

    def open_root(self, path: str) -> int:
        """Open a folder by its path; the last component may be a link, the user named it."""
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def make_folder(self, name: str, folder: int) -> None:
        """Make a folder inside an open folder, for this user only."""
        os.mkdir(name, 0o700, dir_fd=folder)

    def open_folder(self, name: str, folder: int) -> int:
        """Open a folder inside an open folder; a link is refused."""
        return os.open(name, os.O_RDONLY | os.O_DIRECTORY | _OPEN, dir_fd=folder)

    def restrict(self, descriptor: int) -> None:
        """Let only its owner into an open folder."""
        os.fchmod(descriptor, 0o700)

    def names(self, folder: int) -> list[str]:
        """Names in an open folder, without ``.`` and ``..``."""
        # A folder of its own to read from: threads that list one descriptor share its position.
        own = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=folder)
        try:
            return os.listdir(own)
        finally:
            os.close(own)

    def open_reading(self, name: str, folder: int) -> int:
        """Open a file for reading; a link is refused and a pipe isn't waited for."""
        return os.open(name, os.O_RDONLY | os.O_NONBLOCK | _OPEN, dir_fd=folder)

    def open_new(self, name: str, folder: int) -> int:
        """Make a file that isn't there yet, for this user only, and open it for writing."""
        return os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _OPEN, 0o600, dir_fd=folder)

    def open_lock(self, name: str, folder: int, create: bool) -> int:
        """Open a file to lock and to keep a few bytes in."""
        flags = os.O_RDWR | os.O_NONBLOCK | _OPEN | (os.O_CREAT if create else 0)
        return os.open(name, flags, 0o600, dir_fd=folder)

    def close(self, descriptor: int) -> None:
        """Close a descriptor."""
        os.close(descriptor)

    def state(self, descriptor: int) -> FileState:
        """State of an open file."""
        return _state(os.fstat(descriptor))

    def state_of(self, name: str, folder: int) -> FileState:
        """State of a file by name; of a link itself, not of what it points to."""
        return _state(os.stat(name, dir_fd=folder, follow_symlinks=False))

    def read(self, descriptor: int, into: memoryview, offset: int) -> int:
        """Read at `offset` into memory; returns the bytes read, 0 at the end of the file."""
        return os.preadv(descriptor, [into], offset)

    def write(self, descriptor: int, data: memoryview) -> int:
        """Write at the descriptor's position; returns the bytes written."""
        return os.write(descriptor, data)

    def write_at(self, descriptor: int, data: bytes, offset: int) -> int:
        """Write at `offset`; returns the bytes written."""
        return os.pwrite(descriptor, data, offset)

    def flush(self, descriptor: int) -> None:
        """Wait until a file or folder is on the medium."""
        os.fsync(descriptor)

    def set_modified(self, descriptor: int, modified_ns: int) -> None:
        """Set an open file's time of modification (and of access, which nobody reads)."""
        os.utime(descriptor, ns=(modified_ns, modified_ns))

    def rename(self, name: str, folder: int, new_name: str, new_folder: int) -> None:
        """Move within the root; a file of the new name is replaced at once."""
        os.rename(name, new_name, src_dir_fd=folder, dst_dir_fd=new_folder)

    def remove(self, name: str, folder: int) -> None:
        """Remove a file or a link, never what it points to."""
        os.unlink(name, dir_fd=folder)

    def remove_folder(self, name: str, folder: int) -> None:
        """Remove an empty folder."""
        os.rmdir(name, dir_fd=folder)

    def lock(self, descriptor: int) -> bool:
        """Take the exclusive lock of an open file; False if somebody holds it. Never waits."""
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def unlock(self, descriptor: int) -> None:
        """Give the lock back, also for children that were forked while it was held."""
        fcntl.flock(descriptor, fcntl.LOCK_UN)


def _state(found: os.stat_result) -> FileState:
    return FileState(
        mode=found.st_mode,
        inode=found.st_ino,
        size=found.st_size,
        modified_ns=found.st_mtime_ns,
        changed_ns=found.st_ctime_ns,
        owner=found.st_uid,
    )
