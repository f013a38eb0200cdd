"""A window's key: a name that only an equal window can have."""

from __future__ import annotations

import hashlib
import hmac
import re
import struct
from collections.abc import Sequence

from rag_windows.errors import CacheError, InputError

FORMAT_VERSION = 2
"""Incremented when the meaning of entries changes; older entries are then never found again."""

NO_TOKENIZER = hashlib.sha256(b"token ids only").digest()
"""Stands for the tokenizer's fingerprint where there is none."""

_KEY = re.compile(r"[0-9a-f]{64}")


def is_key(text: object) -> bool:
    """Whether this is a sha256 in lowercase hexadecimal."""
    return isinstance(text, str) and _KEY.fullmatch(text) is not None


def check_key(key: str) -> str:
    """Return a key; nothing else may name a file."""
    if not is_key(key):
        raise CacheError(
            f"A cache key must have 64 lowercase hexadecimal characters, not {key!r:.80}."
        )
    return key


def fields(*parts: bytes) -> bytes:
    """Join byte strings so that no two lists of them give the same bytes: lengths go first."""
    return b"".join(len(part).to_bytes(8, "big") + part for part in parts)


def id_bytes(ids: Sequence[int]) -> bytes:
    """Token ids as 64-bit little-endian numbers, without a Python loop over them."""
    return struct.pack(f"<{len(ids)}q", *ids)


def salt_key(salt: str | bytes | None) -> bytes:
    """The secret that keys are made with; without a salt it is a public constant."""
    if salt is None:
        return hashlib.sha256(b"rag-windows passage cache, no salt").digest()
    if not isinstance(salt, str | bytes) or not salt:
        raise InputError("salt must be a string or bytes that are not empty, or None for no salt.")
    raw = salt.encode() if isinstance(salt, str) else salt
    return hashlib.sha256(fields(b"rag-windows passage cache, salt", raw)).digest()


def label_digest(salt: bytes, label: str) -> str:
    """What entries hold in place of an id of a passage or document: 32 hexadecimal digits."""
    named = fields(b"label", label.encode("utf-8", "surrogatepass"))
    return hmac.digest(salt, named, "sha256").hex()[:32]


class KeyScope:
    """Keys of all windows that one prefix of one model can have.

    A key is the HMAC-SHA256, under the salt, of all that the keys and values of a window depend
    on, each part led by its length.
    """

    def __init__(
        self,
        salt: bytes,
        *,
        model: bytes,
        tokenizer: bytes,
        encoding: str,
        store: str,
        prefix_ids: Sequence[int],
    ) -> None:
        version = FORMAT_VERSION.to_bytes(8, "big")
        parts = version, model, tokenizer, encoding.encode(), store.encode()
        # The prefix itself depends on nothing before it, so its key holds only its own ids.
        self._prefix_mac = hmac.new(salt, fields(b"prefix", *parts), hashlib.sha256)
        self._prefix_ids = id_bytes(prefix_ids)
        behind = fields(b"window", *parts, self._prefix_ids)
        self._window_mac = hmac.new(salt, behind, hashlib.sha256)

    def prefix_key(self) -> str:
        """Key of the prefix's own keys and values."""
        mac = self._prefix_mac.copy()
        mac.update(fields(self._prefix_ids))
        return mac.hexdigest()

    def window_key(self, ids: Sequence[int], start: int, before: Sequence[int] = ()) -> str:
        """Key of a window behind the prefix whose first token is at position `start`.

        ``before`` are the tokens directly in front of it, in sight of which it was encoded.
        """
        mac = self._window_mac.copy()
        mac.update(fields(start.to_bytes(8, "big"), id_bytes(ids)))
        if before:
            mac.update(fields(id_bytes(before)))
        return mac.hexdigest()
