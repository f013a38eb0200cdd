"""The file of one entry: written whole or not at all, and proved right before any of it is used.

It is a plain safetensors file (https://github.com/huggingface/safetensors#format): 8 bytes
little-endian length, that many bytes of JSON, then the tensors without gaps. Two things are added.
The JSON begins with fixed bytes that name format and version, and right after them stands a seal:
the sha256 of length and JSON with the seal itself as zeros. The JSON is padded with spaces until
the tensors begin at a multiple of 64 bytes, and holds a digest of all their bytes.

The safetensors library isn't used for reading: it maps the file into memory, where truncation by
another process kills this one, and it checks no digest.

The digests prove that what was read is what was written. They are no defence against somebody who
can write into the folder and could replace digest and payload together. XXH3 with 128 bits reads 5
times the bytes per second of a core's sha256 instructions (7.9 to 1.5 GB/s), which keeps reading
within reach of plain ``cat``; sha256 is there for those who want it.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import json
import math
import os
import stat
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
import xxhash

from rag_windows.cache.codec import Codec, Entry, Stored
from rag_windows.errors import CacheError

T = TypeVar("T")

VERSION = 2
ALIGNMENT = 64
LENGTH_BYTES = 8
MAX_HEADER_BYTES = 1 << 20
ENDING = ".safetensors"

CHUNK_BYTES = 1 << 20
"""Bytes digested at a time: few enough to be in a processor's cache still when they were read."""

_MOST_WRITTEN = 1 << 26  # bytes a call; some systems refuse 2 GiB
_FIRST_BYTES = 4096


class Digest(Protocol):
    """A running digest."""

    def update(self, data: memoryview, /) -> None:
        """Take in more bytes."""

    def hexdigest(self) -> str:
        """What they come to."""


DIGESTS: dict[str, Callable[[], Digest]] = {
    "xxh3-128": xxhash.xxh3_128,
    "sha256": hashlib.sha256,
}
"""Of a payload, by the name that the header gives."""

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Storable dtypes by their safetensors names."""

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_START = b'{"__metadata__":{"format":"rag-windows window %d","seal":"'
_MAGIC = _START % VERSION
_OLDER = tuple(_START % version for version in range(1, VERSION))
_SEAL = slice(LENGTH_BYTES + len(_MAGIC), LENGTH_BYTES + len(_MAGIC) + 64)
_NO_SEAL = b"0" * 64


class FormatError(CacheError):
    """A file isn't what it should be; the disk tier turns this into a miss."""


class OutdatedError(FormatError):
    """An older version wrote the file; the disk tier drops it."""


class WrongFileError(FormatError):
    """A file isn't what its name says.

    Attributes:
        inode: which file it was, as somebody may have replaced it meanwhile; None if not known.
    """

    def __init__(self, message: str, inode: int | None) -> None:
        super().__init__(message)
        self.inode = inode


@dataclass(frozen=True, slots=True)
class Slot:
    """One tensor of the payload, which begins at offset `begin`."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int

    @property
    def nbytes(self) -> int:
        """Its size."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Image:
    """A file before it is written.

    Attributes:
        header: everything before the payload.
        payload: its parts in order; they keep the tensors alive that they show.
        nbytes: size of the file.
    """

    header: bytes
    payload: tuple[memoryview, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class Note:
    """What a file's header says, proved by its seal.

    Attributes:
        labels: the entry's labels when it was encoded.
        created: unix time in seconds.
        expires: unix time in seconds, or None.
        cost_s: seconds that encoding took.
        start: position of the first token.
        tokens: how many there are.
        codec: name of the stored form.
        description: what that form needs for decoding.
        runs: for each tensor of the payload: which of the stored form's tensors are stacked in it.
        digest: name and value of the payload's digest.
        slots: the payload's tensors.
        header_nbytes: where the payload begins.
    """

    labels: tuple[str, ...]
    created: float
    expires: float | None
    cost_s: float
    start: int
    tokens: int
    codec: str
    description: dict[str, Any]
    runs: tuple[tuple[int, ...], ...]
    digest: tuple[str, str]
    slots: tuple[Slot, ...]
    header_nbytes: int

    @property
    def payload_nbytes(self) -> int:
        """Size of the payload."""
        return self.slots[-1].begin + self.slots[-1].nbytes if self.slots else 0

    def expired(self, now: float) -> bool:
        """Whether its time is up at unix time `now`; so it is if it is no number."""
        return self.expires is not None and not now < self.expires


@dataclass(frozen=True, slots=True)
class OpenFile:
    """An entry's file, open for reading, whose header is proved right."""

    descriptor: int
    state: os.stat_result
    note: Note


# Writing


def image_of(key: str, entry: Entry, codec: Codec, digest: str) -> Image:
    """Lay an entry out as a file.

    Token ids are left out, as anybody with the tokenizer can read them. Tensors of one dtype and
    shape are stacked as one, so that reading makes few of them: the layers of most models take a
    single one.

    Args:
        key: the entry's checked key.
        entry: on any device.
        codec: gives the stored form.
        digest: a name in `DIGESTS`.

    Raises:
        FormatError: for a dtype that can't be stored, or a header that gets too long.
        CacheError: what the codec raises.
    """
    stored = codec.encode(entry.window)
    runs = _stacked(stored.tensors)
    slots: list[Slot] = []
    for number, run in enumerate(runs):
        first = stored.tensors[run[0]]
        if first.dtype not in _NAMES:
            raise FormatError(f"tensors of {first.dtype} can't be stored.")
        begin = slots[-1].begin + slots[-1].nbytes if slots else 0
        slots.append(Slot(f"run{number}", first.dtype, (len(run), *first.shape), begin))
    ordered = [stored.tensors[index] for run in runs for index in run]
    payload = tuple(_bytes_of(tensor) for tensor in ordered if tensor.numel())
    running = DIGESTS[digest]()
    for part in payload:
        running.update(part)
    note = {
        "key": key,
        "labels": list(entry.labels),
        "created": _finite(entry.created),
        "expires": None if entry.expires is None else _finite(entry.expires),
        "cost_s": _finite(entry.cost_s),
        "start": entry.window.start,
        "tokens": len(entry.window.ids),
        "codec": codec.name,
        "description": stored.description,
        "runs": runs,
        "digest": [digest, running.hexdigest()],
    }
    header = header_bytes(note, slots)
    return Image(header, payload, len(header) + sum(part.nbytes for part in payload))


def write_image(descriptor: int, image: Image) -> None:
    """Write a new file's content and wait until the medium has it.

    Raises:
        OSError: if the system can't.
    """
    for part in (memoryview(image.header), *image.payload):
        done = 0
        while done < len(part):
            count = os.write(descriptor, part[done : done + _MOST_WRITTEN])
            if count <= 0:
                raise OSError(errno.EIO, "nothing was written")
            done += count
    os.fsync(descriptor)


def header_bytes(note: Mapping[str, Any], slots: Sequence[Slot]) -> bytes:
    """Everything that stands before the payload.

    Raises:
        FormatError: if it would be longer than `MAX_HEADER_BYTES`.
    """
    text = json.dumps(json.dumps(note, separators=(",", ":")))
    described = {
        slot.name: {
            "dtype": _NAMES[slot.dtype],
            "shape": slot.shape,
            "data_offsets": [slot.begin, slot.begin + slot.nbytes],
        }
        for slot in slots
    }
    tensors = json.dumps(described, separators=(",", ":"))[1:]
    comma = "," if described else ""
    body = _MAGIC + _NO_SEAL + f'","note":{text}}}{comma}{tensors}'.encode("ascii")
    body += b" " * (-(LENGTH_BYTES + len(body)) % ALIGNMENT)
    if len(body) > MAX_HEADER_BYTES:
        raise FormatError(f"the header takes {len(body)} bytes, more than {MAX_HEADER_BYTES}.")
    unsealed = struct.pack("<Q", len(body)) + body
    seal = hashlib.sha256(unsealed).hexdigest().encode("ascii")
    return unsealed[: _SEAL.start] + seal + unsealed[_SEAL.stop :]


def _stacked(tensors: Sequence[torch.Tensor]) -> list[list[int]]:
    """Indices of tensors of one dtype and shape together; wide dtypes first, so all are aligned."""
    runs: dict[tuple[torch.dtype, torch.Size], list[int]] = {}
    for index, tensor in enumerate(tensors):
        runs.setdefault((tensor.dtype, tensor.shape), []).append(index)
    return sorted(runs.values(), key=lambda run: -tensors[run[0]].dtype.itemsize)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def _finite(seconds: float) -> float:
    return float(seconds) if math.isfinite(seconds) else 0.0


# Reading


@contextlib.contextmanager
def opened(folder: int, key: str) -> Iterator[OpenFile]:
    """Open an entry's file and prove its header, its name and its length.

    Args:
        folder: descriptor of the folder of entries.
        key: checked.

    Raises:
        FileNotFoundError: if there is none.
        OutdatedError: if an older version wrote it.
        WrongFileError: if it isn't what its name says, while this context lasts.
        OSError: if it can't be read.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        descriptor = os.open(key + ENDING, flags, dir_fd=folder)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise WrongFileError("the file is a link.", None) from error
        raise
    try:
        state = os.fstat(descriptor)
        try:
            yield OpenFile(descriptor, state, _note_of(descriptor, state, key))
        except OutdatedError:
            raise
        except FormatError as error:
            raise WrongFileError(str(error), state.st_ino) from error
        except OSError as error:
            if error.errno == errno.EIO:
                raise WrongFileError("the medium can't be read.", state.st_ino) from error
            raise
    finally:
        with contextlib.suppress(OSError):  # that this fails changes nothing that was read
            os.close(descriptor)


def read_entry(file: OpenFile, codec: Codec, room: torch.Tensor | None = None) -> Entry:
    """Read the payload into memory of our own and prove it, in one pass over its bytes.

    Args:
        file: from `opened`.
        codec: of the stored form that is wanted.
        room: memory to use if it is large enough; see `room_for`.

    Raises:
        FormatError: if it isn't what the header says, or of another form.
        OSError: if it can't be read, or there is no memory for it.
    """
    note = file.note
    if note.codec != codec.name:
        raise FormatError(f"the file holds the form {note.codec!r:.40}.")
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
        _fill(file.descriptor, chunk, note.header_nbytes + begin)
        digest.update(chunk)
    if digest.hexdigest() != value:
        raise FormatError("the payload's digest is wrong.")
    try:
        return decode(note, payload, codec)
    except FormatError:
        raise
    except (CacheError, ValueError, TypeError, KeyError, RuntimeError) as error:
        # Seal and digest are right, so somebody wrote it so; still it can't be proved right.
        raise FormatError(f"the file can't be decoded: {error}") from error


def room_for(folder: int, key: str) -> torch.Tensor | None:
    """Memory for an entry's payload, by the size of its file; None if that can't be had.

    For threads that read: what they allocate themselves comes from heaps that the C library
    gives back as soon as they are free, and new pages cost more than reading into old ones.
    """
    try:
        state = os.stat(key + ENDING, dir_fd=folder, follow_symlinks=False)
        return (
            torch.empty(state.st_size, dtype=torch.uint8) if stat.S_ISREG(state.st_mode) else None
        )
    except (OSError, RuntimeError):  # no file, or no memory: reading will tell
        return None


def header_length(start: bytes) -> int:
    """Bytes before the payload, from the first `LENGTH_BYTES` of a file.

    Raises:
        FormatError: if no header of ours has that length.
    """
    if len(start) < LENGTH_BYTES:
        raise FormatError("the file is too short for a header.")
    length = LENGTH_BYTES + int(struct.unpack_from("<Q", start)[0])
    if not _SEAL.stop < length <= LENGTH_BYTES + MAX_HEADER_BYTES or length % ALIGNMENT:
        raise FormatError("the header's length is impossible.")
    return length


def read_note(header: bytes, key: str) -> Note:
    """Prove a header right and that it belongs to `key`.

    Raises:
        OutdatedError: if an older version wrote it.
        FormatError: if anything else about it is wrong.
    """
    if header.startswith(_OLDER, LENGTH_BYTES):
        raise OutdatedError("an older version wrote the file.")
    if not header.startswith(_MAGIC, LENGTH_BYTES):
        raise FormatError("the file is no window of this format and version.")
    unsealed = header[: _SEAL.start] + _NO_SEAL + header[_SEAL.stop :]
    seal = hashlib.sha256(unsealed).hexdigest().encode("ascii")
    if header_length(header) != len(header) or not hmac.compare_digest(seal, header[_SEAL]):
        raise FormatError("the header's seal is broken.")
    try:
        described = json.loads(header[LENGTH_BYTES:])
        said = json.loads(described.pop("__metadata__")["note"])
        slots = [_slot(name, found) for name, found in described.items()]
        digest, value = said["digest"]
        note = Note(
            labels=tuple(_typed(label, str) for label in said["labels"]),
            created=float(said["created"]),
            expires=None if said["expires"] is None else float(said["expires"]),
            cost_s=float(said["cost_s"]),
            start=_typed(said["start"], int),
            tokens=_typed(said["tokens"], int),
            codec=_typed(said["codec"], str),
            description=_typed(said["description"], dict),
            runs=tuple(tuple(_typed(i, int) for i in run) for run in said["runs"]),
            digest=(_typed(digest, str), _typed(value, str)),
            slots=tuple(slots),
            header_nbytes=len(header),
        )
        named = said["key"]
    except (
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        OverflowError,
        RecursionError,
    ) as error:
        raise FormatError(f"the header can't be read: {error}") from error
    if named != key:
        raise FormatError("the file belongs to another key.")
    _check_tensors(note)
    return note


def decode(note: Note, payload: torch.Tensor, codec: Codec) -> Entry:
    """Turn a payload, whose digest was right, into its entry.

    Args:
        note: from `read_note`.
        payload: (n,) uint8 in owned memory; the entry's tensors are views of it.
        codec: what the note names.

    Returns:
        The entry; all ids of its window are 0, since the file does not hold them.

    Raises:
        CacheError: if tensors and header don't fit.
    """
    tensors: dict[int, torch.Tensor] = {}
    for run, slot in zip(note.runs, note.slots, strict=True):
        flat = payload[slot.begin : slot.begin + slot.nbytes]
        stack = flat.view(slot.dtype).view(slot.shape)
        tensors.update(zip(run, stack.unbind(0), strict=True))
    stored = Stored(tuple(tensors[i] for i in range(len(tensors))), note.description)
    window = codec.decode(stored, (0,) * note.tokens, note.start)
    return Entry(window, note.cost_s, note.labels, note.created, note.expires)


def _note_of(descriptor: int, state: os.stat_result, key: str) -> Note:
    if not stat.S_ISREG(state.st_mode):
        raise FormatError("it is no plain file.")
    if state.st_size < LENGTH_BYTES:
        raise FormatError("the file is too short.")
    head = bytearray(min(state.st_size, _FIRST_BYTES))
    _fill(descriptor, memoryview(head), 0)
    length = header_length(bytes(head[:LENGTH_BYTES]))
    if length > state.st_size:
        raise FormatError("the file is shorter than its header.")
    if length > len(head):
        rest = bytearray(length - len(head))
        _fill(descriptor, memoryview(rest), len(head))
        head += rest
    note = read_note(bytes(head[:length]), key)
    if state.st_size != length + note.payload_nbytes:
        raise FormatError("the file's length is wrong.")
    return note


def _fill(descriptor: int, into: memoryview, offset: int) -> None:
    done = 0
    while done < len(into):
        count = os.preadv(descriptor, [into[done:]], offset + done)
        if count <= 0:
            raise FormatError("the file ends too early.")
        done += count


def _slot(name: str, found: dict[str, Any]) -> Slot:
    shape = tuple(found["shape"])
    begin, end = found["data_offsets"]
    if not all(type(n) is int and n >= 0 for n in (*shape, begin, end)):
        raise ValueError("sizes must be whole numbers.")
    slot = Slot(name, DTYPES[found["dtype"]], shape, begin)
    if end - begin != slot.nbytes:
        raise ValueError("a tensor's size doesn't fit its shape.")
    return slot


def _check_tensors(note: Note) -> None:
    end = 0
    for slot in note.slots:
        if slot.begin != end or end % slot.dtype.itemsize:
            raise FormatError(f"tensor {slot.name!r:.80} is out of place.")
        end += slot.nbytes
    if len(note.runs) != len(note.slots) or not 0 <= note.tokens <= end:
        raise FormatError("header and tensors don't fit.")
    for run, slot in zip(note.runs, note.slots, strict=True):
        if not slot.shape or slot.shape[0] != len(run):
            raise FormatError("header and tensors don't fit.")
    held = sorted(index for run in note.runs for index in run)
    if held != list(range(len(held))):
        raise FormatError("a tensor is missing or there twice.")
    if note.start < 0 or note.digest[0] not in DIGESTS:
        raise FormatError("the header says what this version doesn't know.")


def _typed(value: object, kind: type[T]) -> T:
    if type(value) is not kind:
        raise ValueError(f"{kind.__name__} expected, not {type(value).__name__}")
    return value
