"""Whether a book, or a passage, is the one that it was."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from rag_windows.cache.keys import fields
from rag_windows.errors import CacheError
from rag_windows.passage import Passage

_WHAT = {
    "model": "another model (other weights, config or precision, or another version of torch or "
    "transformers)",
    "tokenizer": "another tokenizer or chat template",
    "prefix": "another prefix (system prompt or tools)",
    "encoding": "another encoding of its windows (another refinement, or none)",
}


def require_same(made_for: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuse windows that depend on something else than what there is now.

    Args:
        made_for: from `Preparer.made_for`, when the book was made.
        now: the same now.

    Raises:
        CacheError: naming all that differs.
    """
    differs = [what for name, what in _WHAT.items() if made_for.get(name) != now[name]]
    if differs:
        raise CacheError(
            f"This book was made with {'; and with '.join(differs)} than there is now. Open it as "
            "it was made, or make another book, in a folder of its own."
        )


def same_passage(one: Passage, other: Passage) -> bool:
    """Whether all but the id is equal."""
    return (one.text, one.title, one.score, dict(one.metadata)) == (
        other.text,
        other.title,
        other.score,
        dict(other.metadata),
    )


def made_id(passage: Passage) -> str:
    """An id that only an equal text and title give."""
    parts = [part.encode("utf-8", "surrogatepass") for part in (passage.title or "", passage.text)]
    return hashlib.sha256(fields(*parts)).hexdigest()[:32]
