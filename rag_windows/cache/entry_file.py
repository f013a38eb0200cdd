"""The file of one entry: written atomically, and verified before any of it is used.

It is a plain safetensors file (https://github.com/huggingface/safetensors#format): 8 bytes
little-endian length, that many bytes of JSON, then the tensors without gaps. Two things are added.
The JSON begins with fixed bytes that name format and version, and right after them stands a seal:
the sha256 of length and JSON with the seal itself as zeros. The JSON is padded with spaces until
the tensors begin at a multiple of 64 bytes, and holds a digest of all their bytes: XXH3 with 128
bits, 5 times as fast as sha256. Both prove that what was read is what was written; they are no
defence against somebody who can write into the folder. The safetensors library isn't used for
reading: it maps the file, where truncation by another process kills this one, and checks no digest.
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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import xxhash
from pydantic import BaseModel, ConfigDict, Field

from rag_windows.cache import codec
from rag_windows.cache.codec import Entry, Stored
from rag_windows.errors import CacheError

ALIGNMENT = 64
LENGTH_BYTES = 8
MAX_HEADER_BYTES = 1 << 20
ENDING = ".safetensors"

_CHUNK_BYTES = 1 << 20  # digested at a time: few enough to be in a processor's cache still
_MOST_WRITTEN = 1 << 26  # bytes a call; some systems refuse 2 GiB
_FIRST_BYTES = 4096
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I8": torch.int8,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_MAGIC = b'{"__metadata__":{"format":"rag-windows window 2","seal":"'
_SEAL = slice(LENGTH_BYTES + len(_MAGIC), LENGTH_BYTES + len(_MAGIC) + 64)


class FormatError(CacheError):
    """A file (of this inode, if it could be opened) is invalid: its entry is a miss."""

    inode: int | None = None


class EntryHeader(BaseModel):
    """What a file says of its entry; `runs` are the tensors stacked in each of the file's."""

    model_config = ConfigDict(frozen=True, strict=True)

    key: str
    labels: tuple[str, ...]
    created: float
    expires: float | None
    cost_s: float
    start: int = Field(ge=0)
    tokens: int = Field(ge=0)
    codec: str
    description: dict[str, Any]
    runs: tuple[tuple[int, ...], ...]
    digest: tuple[Literal["xxh3-128"], str]


class Tensor(BaseModel):
    """A tensor of the payload, as safetensors describes it."""

    dtype: Literal["F64", "F32", "F16", "BF16", "I8"]
    shape: list[int]
    data_offsets: tuple[int, int]


Fill = Callable[[memoryview, int], None]
"""Puts an entry's bytes from an offset on into memory; a `FormatError` if they end too early."""


@dataclass(frozen=True, slots=True)
class OpenFile:
    """An entry's file or image, whose header is verified, and where its payload is.

    `changed` is a unix time. For read-only files the catalog holds `more_labels`.
    """

    fill: Fill
    note: EntryHeader
    tensors: Sequence[Tensor]
    payload: range
    changed: float = 0.0
    more_labels: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of the whole file."""
        return self.payload.stop

    def expired(self, now: float) -> bool:
        """Whether it has expired at unix time `now`; always if its time is NaN."""
        return self.note.expires is not None and not now < self.note.expires


def image_of(key: str, entry: Entry, store: str) -> list[memoryview]:
    """An entry as a file, without token ids; tensors of one dtype and shape are stacked as one."""
    form = entry.form(store)
    stored = codec.encode(form, entry.window)
    runs: dict[tuple[torch.dtype, torch.Size], list[int]] = {}
    for index, tensor in enumerate(stored.tensors):
        runs.setdefault((tensor.dtype, tensor.shape), []).append(index)
    # Wide dtypes first, so all are aligned.
    ordered = sorted(runs.items(), key=lambda run: -run[0][0].itemsize)
    described: dict[str, Any] = {}
    payload: list[memoryview] = []
    running = xxhash.xxh3_128()
    end = 0
    for number, ((dtype, shape), run) in enumerate(ordered):
        if dtype not in _NAMES:
            raise FormatError(f"tensors of {dtype} can't be stored.")
        begin, end = end, end + len(run) * shape.numel() * dtype.itemsize
        one = {"dtype": _NAMES[dtype], "shape": [len(run), *shape], "data_offsets": [begin, end]}
        described[f"run{number}"] = one
        for index in run if shape.numel() else ():
            bits = stored.tensors[index].detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            payload.append(bits.numpy().data)
            running.update(payload[-1])
    note = {
        "key": key,
        "labels": entry.labels,
        "created": _finite(entry.created),
        "expires": None if entry.expires is None else _finite(entry.expires),
        "cost_s": _finite(entry.cost_s),
        "start": entry.window.start,
        "tokens": len(entry.window.ids),
        "codec": form,
        "description": stored.description,
        "runs": [run for _, run in ordered],
        "digest": ["xxh3-128", running.hexdigest()],
    }
    text = json.dumps(json.dumps(note, separators=(",", ":")))
    tensors = json.dumps(described, separators=(",", ":"))[1:]
    comma = "," if described else ""
    body = _MAGIC + b"0" * 64 + f'","note":{text}}}{comma}{tensors}'.encode("ascii")
    body += b" " * (-(LENGTH_BYTES + len(body)) % ALIGNMENT)
    if len(body) > MAX_HEADER_BYTES:
        raise FormatError(f"the header takes {len(body)} bytes, more than {MAX_HEADER_BYTES}.")
    return [memoryview(_sealed(struct.pack("<Q", len(body)) + body)), *payload]


def write_image(descriptor: int, image: Sequence[memoryview]) -> None:
    """Write a new file's content and wait until the medium has it."""
    for part in image:
        done = 0
        while done < len(part):
            count = os.write(descriptor, part[done : done + _MOST_WRITTEN])
            if count <= 0:
                raise OSError(errno.EIO, "nothing was written")
            done += count
    os.fsync(descriptor)


@contextlib.contextmanager
def opened(path: str, key: str) -> Iterator[OpenFile]:
    """Open an entry's file and verify its header, key and length; else a `FormatError`."""
    inode = None
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            state = os.fstat(descriptor)
            inode = state.st_ino
            if not stat.S_ISREG(state.st_mode):
                raise FormatError("it is not a regular file.")
            yield _proved(
                partial(_read, descriptor),
                state.st_size,
                key,
                changed=state.st_mtime,
                more_labels=not state.st_mode & stat.S_IWUSR,
            )
        finally:
            with contextlib.suppress(OSError):  # a failure changes nothing that was read
                os.close(descriptor)
    except FormatError as error:
        error.inode = inode
        raise
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise FormatError("the file is a link.") from error
        raise


def opened_image(image: bytes, key: str, *, whole: bool) -> OpenFile:
    """The same as `opened`, from a file's bytes, or from its first ones with the whole header."""

    def fill(into: memoryview, offset: int) -> None:
        part = memoryview(image)[offset : offset + len(into)]
        if len(part) != len(into):
            raise FormatError("the file ends too early.")
        into[:] = part

    return _proved(fill, len(image), key, whole=whole)


def read_entry(file: OpenFile, store: str, buffer: torch.Tensor | None = None) -> Entry:
    """Read the payload into memory of our own and verify it, in one pass over its bytes."""
    size = len(file.payload)
    if buffer is None or len(buffer) < size:
        try:
            buffer = torch.empty(size, dtype=torch.uint8)
        except RuntimeError as error:  # torch's error when there is no memory
            raise OSError(errno.ENOMEM, "no memory for a cached window") from error
    verify_payload(file, buffer.numpy().data, file.fill)
    return entry_in(file, store, buffer)


def verify_payload(file: OpenFile, payload: memoryview, fill: Fill | None = None) -> None:
    """Verify a payload, which is complete or filled in first; no tensor is touched."""
    digest, size = xxhash.xxh3_128(), len(file.payload)
    for at in range(0, size, _CHUNK_BYTES):
        chunk = payload[at : min(at + _CHUNK_BYTES, size)]
        if fill is not None:
            fill(chunk, file.payload.start + at)
        digest.update(chunk)
    if digest.hexdigest() != file.note.digest[1]:
        raise FormatError("the payload's digest is wrong.")


def entry_in(file: OpenFile, store: str, buffer: torch.Tensor) -> Entry:
    """The entry whose payload was read into `buffer`."""
    note = file.note
    if note.codec not in (store, codec.EXACT):
        raise FormatError(f"the file holds the form {note.codec!r:.40}.")
    tensors: dict[int, torch.Tensor] = {}
    try:
        for run, one in zip(note.runs, file.tensors, strict=True):
            flat = buffer[slice(*one.data_offsets)]
            stack = flat.view(_DTYPES[one.dtype]).view(one.shape)
            tensors.update(zip(run, stack.unbind(0), strict=True))
        stored = Stored(tuple(tensors[i] for i in range(len(tensors))), note.description)
        window = codec.decode(note.codec, stored, (0,) * note.tokens, note.start)
    except (CacheError, ValueError, TypeError, KeyError, RuntimeError) as error:
        # Seal and digest are right, so it was written like this; it is invalid all the same.
        raise FormatError(f"the file can't be decoded: {error}") from error
    return Entry(
        window,
        note.cost_s,
        note.labels,
        note.created,
        note.expires,
        file.more_labels,
        exact=note.codec == codec.EXACT,
    )


def read_header(header: bytes, key: str) -> tuple[EntryHeader, list[Tensor]]:
    """Verify a header, and that it belongs to `key`."""
    if not header.startswith(_MAGIC, LENGTH_BYTES):
        raise FormatError("the file is not a window of this format and version.")
    if header_length(header) != len(header) or not hmac.compare_digest(_sealed(header), header):
        raise FormatError("the header's seal is broken.")
    try:
        described = json.loads(header[LENGTH_BYTES:])
        note = EntryHeader.model_validate_json(described.pop("__metadata__")["note"])
        tensors = [Tensor.model_validate(one) for one in described.values()]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise FormatError(f"the header can't be read: {error}") from error
    if note.key != key:
        raise FormatError("the file belongs to another key.")
    return note, tensors


def header_length(start: bytes) -> int:
    """Bytes before the payload, from the first `LENGTH_BYTES` of a file."""
    if len(start) < LENGTH_BYTES:
        raise FormatError("the file is too short for a header.")
    length = LENGTH_BYTES + int(struct.unpack_from("<Q", start)[0])
    if not _SEAL.stop < length <= LENGTH_BYTES + MAX_HEADER_BYTES or length % ALIGNMENT:
        raise FormatError("the header's length is impossible.")
    return length


def _proved(fill: Fill, size: int, key: str, *, whole: bool = True, **more: Any) -> OpenFile:
    head = bytearray(min(size, _FIRST_BYTES))
    fill(memoryview(head), 0)
    length = header_length(bytes(head[:LENGTH_BYTES]))
    rest = bytearray(max(0, length - len(head)))
    fill(memoryview(rest), len(head))
    note, tensors = read_header(bytes((head + rest)[:length]), key)
    payload = range(length, length + max((one.data_offsets[1] for one in tensors), default=0))
    right = size == payload.stop if whole else size <= payload.stop
    if not right or note.tokens > len(payload):
        raise FormatError("the file's length is wrong.")
    return OpenFile(fill, note, tensors, payload, **more)


def _sealed(header: bytes) -> bytes:
    """A header with its seal filled in."""
    unsealed = header[: _SEAL.start] + b"0" * 64 + header[_SEAL.stop :]
    seal = hashlib.sha256(unsealed).hexdigest().encode("ascii")
    return header[: _SEAL.start] + seal + header[_SEAL.stop :]


def _read(descriptor: int, into: memoryview, offset: int) -> None:
    done = 0
    while done < len(into):
        count = os.preadv(descriptor, [into[done:]], offset + done)
        if count <= 0:
            raise FormatError("the file ends too early.")
        done += count


def _finite(seconds: float) -> float:
    return float(seconds) if math.isfinite(seconds) else 0.0
