"""Documents as passages, and the one way by which a request brings them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from langchain_core.documents import Document

from langchain_rag_windows.errors import RequestError, in_langchain_terms
from rag_windows import Passage

DocumentLike = Document | Passage | str | Mapping[str, Any]
"""What ``documents=`` takes; a mapping is read as `Passage.of` reads it."""


def as_passage(document: DocumentLike) -> Passage:
    """A document with its id, title, score and metadata.

    The title is ``metadata["title"]``, the score ``metadata["relevance_score"]`` or ``["score"]``.

    Raises:
        RequestError: it is no document.
    """
    if not isinstance(document, Document):
        with in_langchain_terms():
            return Passage.of(document)
    metadata = document.metadata
    identity = document.id if document.id is not None else metadata.get("id")
    title = metadata.get("title")
    score = metadata.get("relevance_score", metadata.get("score"))
    return Passage(
        text=document.page_content,
        id=None if identity is None else str(identity),
        title=None if title is None else str(title),
        score=float(score) if isinstance(score, int | float) else None,
        metadata=dict(metadata),
    )


def as_passages(documents: object) -> tuple[Passage, ...]:
    """The passages of a list of documents; None and an empty list are none.

    Raises:
        RequestError: it is no list, or holds something that is no document.
    """
    if documents is None:
        return ()
    if isinstance(documents, str | Mapping) or not isinstance(documents, Sequence):
        raise RequestError(
            f"documents must be a list of Documents, mappings or strings, not "
            f"{type(documents).__name__}."
        )
    return tuple(as_passage(document) for document in documents)


def is_document_list(value: object) -> bool:
    """Whether a tool's artifact is a non-empty list of Documents."""
    return (
        isinstance(value, list | tuple)
        and bool(value)
        and all(isinstance(entry, Document | Passage) for entry in value)
    )


@dataclass(frozen=True, slots=True)
class Route:
    """One way by which documents can come with a request."""

    name: str
    passages: tuple[Passage, ...]


def only_route(routes: Sequence[Route]) -> tuple[Passage, ...]:
    """The passages of the one route that brings any.

    Raises:
        RequestError: several routes bring documents: which ones are meant would be a guess.
    """
    used = [route for route in routes if route.passages]
    if len(used) > 1:
        names = " and ".join(f"{route.name} ({len(route.passages)})" for route in used)
        raise RequestError(
            f"Documents come in several ways at once: {names}. Use one of them in a request, or "
            "put all documents into one list for documents=."
        )
    return used[0].passages if used else ()
