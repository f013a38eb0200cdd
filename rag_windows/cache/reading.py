"""Reading a file: everything about it is proven before anything of it is used."""

from __future__ import annotations

import contextlib
import errno
import stat
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from rag_windows.cache.container import (
    LENGTH_BYTES,
    FormatError,
    OutdatedError,
    header_length,
)
from rag_windows.cache.digest import DIGESTS
from rag_windows.cache.files import Files, FileState
from rag_windows.cache.folders import Folders, closing
from rag_windows.cache.format import CHUNK_BYTES, Note, read_note
from rag_windows.cache.naming import entry_name

_FIRST_BYTES = 4096


@dataclass(frozen=True, slots=True)
class OpenFile:
    """An entry's file whose header is proven right.

    Attributes:
        descriptor: open for reading.
        state: when it was opened.
        note: what its header says.
    """

    descriptor: int
    state: FileState
    note: Note


class WrongFileError(FormatError):
    """A file isn't what its name says.

    Attributes:
        inode: which file it was, as somebody may have replaced it meanwhile; None if not known.
    """

    def __init__(self, message: str, inode: int | None) -> None:
        super().__init__(message)
        self.inode = inode


@contextlib.contextmanager
def opened(folders: Folders, key: str) -> Iterator[OpenFile]:
    """Open an entry's file and prove its header, its name and its length.

    Raises:
        FileNotFoundError: if there is none.
        OutdatedError: if an older version wrote it.
        WrongFileError: if it isn't what its name says.
        OSError: if it can't be read.
    """
    files = folders.files
    try:
        descriptor = files.open_reading(entry_name(key), folders.entries)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise WrongFileError("the file is a link.", None) from error
        raise
    with closing(files, descriptor):
        state = files.state(descriptor)
        try:
            note = _note(files, descriptor, state, key)
            yield OpenFile(descriptor, state, note)
        except OutdatedError:
            raise
        except FormatError as error:
            raise WrongFileError(str(error), state.inode) from error
        except OSError as error:
            if error.errno == errno.EIO:
                raise WrongFileError("the medium can't be read.", state.inode) from error
            raise


def room_for(folders: Folders, key: str) -> torch.Tensor | None:
    """Memory for an entry's payload, by the size of its file; None if that can't be had.

    For threads that read: what they allocate themselves comes from heaps that the C library
    gives back as soon as they are free, and new pages cost more than reading into old ones.
    """
    try:
        state = folders.files.state_of(entry_name(key), folders.entries)
        if not stat.S_ISREG(state.mode):
            return None
        return torch.empty(state.size, dtype=torch.uint8)
    except (OSError, RuntimeError):  # no file, or no memory: reading will tell
        return None


def read_payload(files: Files, file: OpenFile, room: torch.Tensor | None = None) -> torch.Tensor:
    """Read the payload into memory of our own and prove it, in one pass over its bytes.

    Args:
        files: the system's calls.
        file: open, its header proven.
        room: memory to use if it is large enough; from `room_for`.

    Returns:
        (n,) uint8, at an address that is a multiple of 64.

    Raises:
        FormatError: if it isn't what the header says.
        OSError: if it can't be read, or there is no memory for it.
    """
    note = file.note
    if room is None or len(room) < note.payload_nbytes:
        try:
            room = torch.empty(note.payload_nbytes, dtype=torch.uint8)
        except RuntimeError as error:  # torch's way to say that there is no memory
            raise OSError(errno.ENOMEM, "no memory for a cached window") from error
    payload = room[: note.payload_nbytes]
    view = payload.numpy().data
    algorithm, value = note.digest
    digest = DIGESTS[algorithm]()
    for begin in range(0, note.payload_nbytes, CHUNK_BYTES):
        chunk = view[begin : begin + CHUNK_BYTES]
        _fill(files, file.descriptor, chunk, note.header_nbytes + begin)
        digest.update(chunk)
    if digest.hexdigest() != value:
        raise FormatError("the payload's digest is wrong.")
    return payload


def _note(files: Files, descriptor: int, state: FileState, key: str) -> Note:
    if not stat.S_ISREG(state.mode):
        raise FormatError("it is no plain file.")
    if state.size < LENGTH_BYTES:
        raise FormatError("the file is too short.")
    head = bytearray(min(state.size, _FIRST_BYTES))
    _fill(files, descriptor, memoryview(head), 0)
    length = header_length(bytes(head[:LENGTH_BYTES]))
    if length > state.size:
        raise FormatError("the file is shorter than its header.")
    if length > len(head):
        rest = bytearray(length - len(head))
        _fill(files, descriptor, memoryview(rest), len(head))
        head += rest
    note = read_note(bytes(head[:length]), key)
    if state.size != length + note.payload_nbytes:
        raise FormatError("the file's length is wrong.")
    return note


def _fill(files: Files, descriptor: int, into: memoryview, offset: int) -> None:
    done = 0
    while done < len(into):
        count = files.read(descriptor, into[done:], offset + done)
        if count <= 0:
            raise FormatError("the file ends too early.")
        done += count
