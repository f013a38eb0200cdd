"""Digests of weights, stored beside the cache so that later processes need not hash them again.

The sha256 of all weights takes longer than a first question over cached passages. So it is looked
up, by a fast checksum of the weights in memory, among the digests that an earlier process stored of
a model that was loaded from the same files.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
import stat
from collections.abc import Callable, Sequence
from pathlib import Path

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError

from rag_windows.cache.keys import fields, is_key

FOLDER = "weights"
_SUFFIXES = (".safetensors", ".gguf", ".json")
_DIGEST = hashlib.sha256().digest_size
_MOST_FILES = 32
"""Most files stored; a model of other weights, such as one in training, adds a new one."""


def checkpoint_of(name: str, commit: str | None = None) -> bytes | None:
    """A value that changes with a checkpoint's files; None if no files are known.

    It covers their paths, sizes, devices, inodes, and times of the last change of content and of
    state; no program can set the last of these.

    Args:
        name: the folder or the Hub name that a model was loaded from.
        commit: the Hub's commit that was loaded.
    """
    folder = Path(name)
    try:
        if name and not folder.is_dir():
            found = try_to_load_from_cache(name, "config.json", revision=commit)
            folder = Path(found).parent if isinstance(found, str) else folder
        if not name or not folder.is_dir():
            return None
        parts = []
        for path in sorted(folder.iterdir()):
            if path.suffix in _SUFFIXES:
                state = path.stat()
                times = state.st_mtime_ns, state.st_ctime_ns
                place = os.path.realpath(path), state.st_dev, state.st_ino
                parts.append(repr((*place, state.st_size, *times)).encode())
    except (OSError, HFValidationError):
        return None
    return fields(*parts) if parts else None


class WeightSums:
    """Digests in the folder ``weights`` of a cache; a file that can't be verified is not used.

    A file holds the digests of all tensors that were read together, sealed under the cache's salt
    together with its own name, which stands for the checkpoint's files and the fast checksums. So
    one that is damaged, or was written for other weights or under another salt, is rejected.
    """

    def __init__(self, path: Path, salt: bytes) -> None:
        self._folder = path / FOLDER
        self._salt = salt

    def digests(
        self, checkpoint: bytes, checksums: Sequence[bytes], read: Callable[[], Sequence[bytes]]
    ) -> Sequence[bytes]:
        """The sha256 of each tensor, by the given fast checksums; from `read` if not stored."""
        named = hmac.digest(self._salt, fields(b"weights", checkpoint, *checksums), "sha256")
        path = self._folder / named.hex()
        with contextlib.suppress(OSError):
            stored = self._read(path, _DIGEST * (len(checksums) + 1))
            if hmac.compare_digest(stored[:_DIGEST], self._seal(named, stored[_DIGEST:])):
                return [stored[i : i + _DIGEST] for i in range(_DIGEST, len(stored), _DIGEST)]
        made = read()
        whole = b"".join(made)
        # With a full or read-only folder, the next process computes them again.
        with contextlib.suppress(OSError):
            self._write(path, self._seal(named, whole) + whole)
        return made

    def _seal(self, named: bytes, digests: bytes) -> bytes:
        return hmac.digest(self._salt, fields(b"digests", named, digests), "sha256")

    def _read(self, path: Path, size: int) -> bytes:
        """Read a file of this size, in a folder that only this user can write to.

        Raises:
            OSError: there is none.
        """
        self._check_own()
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            stored = file.read(size + 1)
        if len(stored) != size:
            raise OSError(f"{path} has another size")
        os.utime(path)
        return stored

    def _check_own(self) -> None:
        state = os.stat(self._folder, follow_symlinks=False)
        others = state.st_mode & 0o022 or os.geteuid() not in (state.st_uid, 0)
        if not stat.S_ISDIR(state.st_mode) or others:
            raise NotADirectoryError(f"{self._folder} is no folder of this user alone")

    def _write(self, path: Path, whole: bytes) -> None:
        with contextlib.suppress(FileExistsError):
            os.mkdir(self._folder, 0o700)
        self._check_own()
        writing = path.with_name(f"{path.name}.{secrets.token_hex(8)}.tmp")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            with open(os.open(writing, flags, 0o600), "wb") as file:
                file.write(whole)
                file.flush()
                os.fsync(file.fileno())
            os.rename(writing, path)
        finally:
            with contextlib.suppress(OSError):
                os.unlink(writing)
        self._keep_newest()

    def _keep_newest(self) -> None:
        dated = []
        for entry in os.scandir(self._folder):
            # Unfinished files of processes that died count, too.
            if is_key(entry.name.partition(".")[0]):
                with contextlib.suppress(OSError):
                    dated.append((entry.stat(follow_symlinks=False).st_mtime, entry.path))
        for _, path in sorted(dated)[:-_MOST_FILES]:
            with contextlib.suppress(OSError):
                os.unlink(path)
