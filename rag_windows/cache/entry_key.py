"""The names of entries."""

from __future__ import annotations

import re

from rag_windows.errors import CacheError

_KEY = re.compile(r"[0-9a-f]{64}")


def is_key(text: str) -> bool:
    """Whether this is a sha256 in lowercase hexadecimal."""
    return isinstance(text, str) and _KEY.fullmatch(text) is not None


def check_key(key: str) -> str:
    """Return `key` if it is a sha256 in lowercase hexadecimal; only then is a file named by it.

    Raises:
        CacheError: for anything else, with what was given shortened.
    """
    if not is_key(key):
        raise CacheError(
            f"a cache key is 64 lowercase hexadecimal characters, not {key!r:.80}; "
            "build it with rag_windows.cache.keys."
        )
    return key
