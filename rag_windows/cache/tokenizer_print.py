"""What a tokenizer is: its vocabulary, its rules, its control tokens and its template."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from rag_windows.cache.description import canonical
from rag_windows.cache.keys import fields
from rag_windows.forks import Lock

NO_TOKENIZER = hashlib.sha256(b"token ids only").digest()


class TokenizerIdentity:
    """The fingerprint of a tokenizer, read again when its size or its template changes.

    Args:
        tokenizer: a transformers tokenizer, or None for work with token ids.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._lock = Lock()
        self._seen: tuple[Any, ...] | None = None
        self._print = NO_TOKENIZER

    def fingerprint(self) -> bytes:
        """32 bytes that only an equal tokenizer has."""
        if self._tokenizer is None:
            return NO_TOKENIZER
        seen = (len(self._tokenizer), canonical(getattr(self._tokenizer, "chat_template", None)))
        with self._lock:
            if seen != self._seen:
                self._print = tokenizer_fingerprint(self._tokenizer)
                self._seen = seen
            return self._print


def tokenizer_fingerprint(tokenizer: Any) -> bytes:
    """Read a tokenizer whole; padding and truncation, which callers switch, do not count."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        rules = json.loads(backend.to_str())
        rules.pop("padding", None)
        rules.pop("truncation", None)
    else:
        rules = [
            tokenizer.get_vocab(),
            {str(number): repr(token) for number, token in tokenizer.added_tokens_decoder.items()},
        ]
    special = getattr(tokenizer, "special_tokens_map", {})
    return hashlib.sha256(
        fields(
            type(tokenizer).__qualname__.encode(),
            json.dumps(rules, sort_keys=True).encode(),
            canonical({name: str(value) for name, value in special.items()}),
            canonical(getattr(tokenizer, "chat_template", None)),
        )
    ).digest()
