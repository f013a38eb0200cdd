"""What a book of passages answers."""

from __future__ import annotations

from dataclasses import dataclass

from rag_windows.passage import Note, Passage


@dataclass(frozen=True, slots=True)
class Added:
    """What adding or updating did.

    Attributes:
        ids: of each passage given, in order; None for one that has no text and was not kept.
        evicted: ids of passages that had to go because the book was full, least useful first.
        notes: on blank, repeated and split passages; ``Note.passage`` counts those given.
    """

    ids: tuple[str | None, ...]
    evicted: tuple[str, ...] = ()
    notes: tuple[Note, ...] = ()


@dataclass(frozen=True, slots=True)
class Retrieved:
    """A passage that a query would read.

    Attributes:
        passage: as it was added.
        similarity: of its keys and the query's; see `KeySearch`.
    """

    passage: Passage
    similarity: float
