"""What all processes on one folder agree on: how many bytes it holds, and who knows them all."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass

from rag_windows.cache.files import Files

_FIELDS = struct.Struct("<QQ")
_CHECK_BYTES = 16


@dataclass(frozen=True, slots=True)
class Ledger:
    """A record in the file of the lock around changes; read and written by its holder only.

    A process that remembers the generation knows what the folder holds without listing it.
    After a crash the record may count bytes that are gone, never the other way round.

    Attributes:
        generation: grows with every change.
        nbytes: of entries, of files being written, and of files put aside.
    """

    generation: int
    nbytes: int


def read_ledger(files: Files, descriptor: int) -> Ledger | None:
    """Read the record; None if there is no whole one, and the folder must be listed.

    Raises:
        OSError: if it can't be read.
    """
    data = bytearray(_FIELDS.size + _CHECK_BYTES)
    if files.read(descriptor, memoryview(data), 0) != len(data):
        return None
    fields, check = bytes(data[: _FIELDS.size]), bytes(data[_FIELDS.size :])
    return Ledger(*_FIELDS.unpack(fields)) if check == _check(fields) else None


def write_ledger(files: Files, descriptor: int, ledger: Ledger) -> None:
    """Write the record.

    Raises:
        OSError: if it can't be written; the next reader then finds none or the old one.
    """
    fields = _FIELDS.pack(ledger.generation, max(ledger.nbytes, 0))
    files.write_at(descriptor, fields + _check(fields), 0)


def _check(fields: bytes) -> bytes:
    return hashlib.sha256(fields).digest()[:_CHECK_BYTES]
