"""English words as spaCy's rules split them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

from rag_windows.evaluation.scores.packages import check_packages
from rag_windows.forks import Lock

LONGEST = 5000
"""Characters without a blank that are still split; see `spaced`."""

_SURROGATE = re.compile("[\ud800-\udfff]")
_lock = Lock()
_loaded: list[Callable[[str], Iterable[Any]]] = []


def spaced(text: str) -> str:
    """The text with one blank between its words.

    The rules need no model: they are those of ``spacy.blank("en")``, which every English pipeline
    of spaCy starts with. Their time grows with the square of a run of punctuation, so a stretch of
    more than `LONGEST` characters without a blank stays in one piece. Half a surrogate pair, which
    JSON may hold and spaCy refuses, becomes U+FFFD. May be called from several threads.

    Raises:
        MissingExtraError: spaCy is not installed.
    """
    text = _SURROGATE.sub("\ufffd", text)
    if len(text) <= LONGEST:
        return _spaced(text)
    words = text.split()
    if max(map(len, words), default=0) <= LONGEST:
        return _spaced(text)
    return " ".join(word if len(word) > LONGEST else _spaced(word) for word in words)


def _spaced(text: str) -> str:
    # The tokenizer fills a cache of its own while it works, and spaCy makes no promise on threads.
    with _lock:
        if not _loaded:
            _loaded.append(_load())
        return " ".join(token.text for token in _loaded[0](text))


def _load() -> Callable[[str], Iterable[Any]]:
    check_packages("spacy")
    import spacy

    # Not the pipeline around it, which refuses texts of more than a million characters.
    return spacy.blank("en").tokenizer
