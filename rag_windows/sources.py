"""Which passage and document a window comes from, for errors and for forgetting it."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rag_windows.encoding import Source
from rag_windows.limits import passage_name
from rag_windows.passage import Passage
from rag_windows.prompt import PromptParts

DOCUMENT_KEYS = ("document_id", "doc_id", "ref_doc_id", "source")
"""Where metadata name the document that a passage is part of."""

_PART = re.compile(r"(.+)#\d+", re.DOTALL)


def labels_of(passage: Passage) -> tuple[str, ...]:
    """Ids by which a cache can be told to forget a passage.

    The passage's own id; its document's, which is an id without the ``#3`` that splitting adds, and
    what the metadata say.
    """
    labels: dict[str, None] = {}
    if passage.id:
        labels[passage.id] = None
        if part := _PART.fullmatch(passage.id):
            labels[part[1]] = None
    for key in DOCUMENT_KEYS:
        value = passage.metadata.get(key)
        if isinstance(value, str) and value:
            labels[value] = None
    return tuple(labels)


def sources_of(parts: PromptParts, passages: Sequence[Passage]) -> list[Source]:
    """The source of each window."""
    return [
        Source(
            f"Passage {passage_name(passages[window.passage], window.passage)}",
            labels_of(passages[window.passage]),
        )
        for window in parts.windows
    ]
