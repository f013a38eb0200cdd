"""Names of files in the folder of entries."""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass

_ENTRY = re.compile(r"([0-9a-f]{64})\.safetensors")
_WRITING = re.compile(r"([0-9a-f]{64})\.([0-9]{1,19})\.[0-9a-f]{16}\.tmp")


@dataclass(frozen=True, slots=True)
class FileName:
    """A name that the tier gave.

    Attributes:
        text: the name.
        key: the entry's key.
        reserved: bytes reserved for a file that is being written; None for a whole entry.
    """

    text: str
    key: str
    reserved: int | None


def entry_name(key: str) -> str:
    """The name of an entry's file."""
    return f"{key}.safetensors"


def writing_name(key: str, nbytes: int) -> str:
    """A new name for a file of `nbytes` bytes while it is written."""
    return f"{key}.{nbytes}.{secrets.token_hex(8)}.tmp"


def aside_name(key: str) -> str:
    """A new name for a file that is put aside."""
    return f"{key}.{secrets.token_hex(8)}.bad"


def parse_name(text: str) -> FileName | None:
    """Read a name; None if the tier didn't give it, and then it is left alone."""
    found = _ENTRY.fullmatch(text)
    if found:
        return FileName(text, found[1], None)
    found = _WRITING.fullmatch(text)
    return FileName(text, found[1], int(found[2])) if found else None
