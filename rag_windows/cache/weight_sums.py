"""Digests of weights that were read before, beside the cache: so that a process reads them quickly.

The sha256 of all weights takes longer than a first question over cached passages. It is looked up
instead, by a fast checksum of the very weights in memory, in what an earlier process wrote down of
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
"""Files that are kept; a model of other weights, such as one in training, makes a new one."""


def checkpoint_of(name: str, commit: str | None = None) -> bytes | None:
    """What tells whether a checkpoint's files are those that they were; None if none are known.

    Their paths, sizes, devices, inodes, and times of the last change of content and of state, the
    last of which no program sets.

    Args:
        name: the folder or the Hub name that a model was loaded from.
        commit: the one of the Hub that it was loaded at.
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
    """Digests in the folder ``weights`` of a cache; whatever is wrong with one, it is not used.

    A file holds the digests of all tensors that were read together, sealed under the cache's salt
    together with its own name, which stands for the checkpoint's files and the fast checksums. So
    one that is damaged, or was written for other weights or under another salt, proves nothing.
    """

    def __init__(self, path: Path, salt: bytes) -> None:
        self._folder = path / FOLDER
        self._salt = salt

    def digests(
        self, checkpoint: bytes, checksums: Sequence[bytes], read: Callable[[], Sequence[bytes]]
    ) -> Sequence[bytes]:
        """The sha256 of each tensor, of which the fast checksums are given; read if not found."""
        named = hmac.digest(self._salt, fields(b"weights", checkpoint, *checksums), "sha256")
        path = self._folder / named.hex()
        with contextlib.suppress(OSError):
            kept = self._read(path, _DIGEST * (len(checksums) + 1))
            if hmac.compare_digest(kept[:_DIGEST], self._seal(named, kept[_DIGEST:])):
                return [kept[i : i + _DIGEST] for i in range(_DIGEST, len(kept), _DIGEST)]
        made = read()
        whole = b"".join(made)
        # A folder that is full or read-only costs nothing but time.
        with contextlib.suppress(OSError):
            self._write(path, self._seal(named, whole) + whole)
        return made

    def _seal(self, named: bytes, digests: bytes) -> bytes:
        return hmac.digest(self._salt, fields(b"digests", named, digests), "sha256")

    def _read(self, path: Path, size: int) -> bytes:
        """A file of this size, in a folder that nobody else can write to.

        Raises:
            OSError: there is none.
        """
        self._check_own()
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            kept = file.read(size + 1)
        if len(kept) != size:
            raise OSError(f"{path} has another size")
        os.utime(path)
        return kept

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
            # What a process left behind that died while it wrote counts, too.
            if is_key(entry.name.partition(".")[0]):
                with contextlib.suppress(OSError):
                    dated.append((entry.stat(follow_symlinks=False).st_mtime, entry.path))
        for _, path in sorted(dated)[:-_MOST_FILES]:
            with contextlib.suppress(OSError):
                os.unlink(path)
