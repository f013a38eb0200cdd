"""Bytes of a safetensors file with a sealed header.

The file is a plain safetensors file (https://github.com/huggingface/safetensors#format): 8 bytes
little-endian length, that many bytes of JSON, then the tensors without gaps. Any tool that knows
the format can look into it. Two things are added. The JSON begins with fixed bytes that name
format and version, and right after them stands a seal: the sha256 of length and JSON with the seal
itself as zeros, so that no bit of them can change unseen. The JSON is padded with spaces until the
tensors begin at a multiple of 64 bytes.

The safetensors library isn't used for reading: it maps the file into memory, where truncation by
another process kills this one, and it checks no digest.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rag_windows.errors import CacheError

VERSION = 2
ALIGNMENT = 64
LENGTH_BYTES = 8
MAX_HEADER_BYTES = 1 << 20

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


@dataclass(frozen=True, slots=True)
class Slot:
    """One tensor of the payload.

    Attributes:
        name: in the file.
        dtype: of its elements.
        shape: of all of it.
        begin: offset of its first byte in the payload.
        nbytes: its size.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    nbytes: int


def lay_out(tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> list[Slot]:
    """Place tensors one behind the other, in the order given.

    Args:
        tensors: dtype and shape by name. Wider dtypes first, so that all are aligned.

    Raises:
        FormatError: for a dtype that can't be stored.
    """
    slots: list[Slot] = []
    begin = 0
    for name, (dtype, shape) in tensors.items():
        if dtype not in _NAMES:
            raise FormatError(f"tensors of {dtype} can't be stored.")
        slot = Slot(name, dtype, shape, begin, _nbytes(dtype, shape))
        begin += slot.nbytes
        slots.append(slot)
    return slots


def header_bytes(note: Mapping[str, Any], slots: Sequence[Slot]) -> bytes:
    """Everything that stands before the payload.

    Args:
        note: what to say about the tensors, plain JSON.
        slots: from `lay_out`.

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


def parse_header(data: bytes) -> tuple[dict[str, Any], list[Slot]]:
    """Prove a header right and read it.

    Args:
        data: all bytes before the payload.

    Returns:
        The note, and the slots, which lie one behind the other from offset 0.

    Raises:
        OutdatedError: if an older version wrote it.
        FormatError: if anything else about it is wrong.
    """
    if data.startswith(_OLDER, LENGTH_BYTES):
        raise OutdatedError("an older version wrote the file.")
    if not data.startswith(_MAGIC, LENGTH_BYTES):
        raise FormatError("the file is no window of this format and version.")
    unsealed = data[: _SEAL.start] + _NO_SEAL + data[_SEAL.stop :]
    seal = hashlib.sha256(unsealed).hexdigest().encode("ascii")
    if header_length(data) != len(data) or not hmac.compare_digest(seal, data[_SEAL]):
        raise FormatError("the header's seal is broken.")
    try:
        described = json.loads(data[LENGTH_BYTES:])
        note = json.loads(described.pop("__metadata__")["note"])
        slots = [_slot(name, found) for name, found in described.items()]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise FormatError(f"the header can't be read: {error}") from error
    end = 0
    for slot in slots:
        if slot.begin != end or end % slot.dtype.itemsize:
            raise FormatError(f"tensor {slot.name!r:.80} is out of place.")
        end += slot.nbytes
    if not isinstance(note, dict):
        raise FormatError("the header's note is no object.")
    return note, slots


def _slot(name: str, found: dict[str, Any]) -> Slot:
    dtype, shape = DTYPES[found["dtype"]], tuple(found["shape"])
    begin, end = found["data_offsets"]
    if not all(type(n) is int and n >= 0 for n in (*shape, begin, end)):
        raise ValueError("sizes must be whole numbers.")
    nbytes = _nbytes(dtype, shape)
    if end - begin != nbytes:
        raise ValueError("a tensor's size doesn't fit its shape.")
    return Slot(name, dtype, shape, begin, nbytes)


def _nbytes(dtype: torch.dtype, shape: Sequence[int]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count * dtype.itemsize
