"""One passage of a book, and how often it was of use."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rag_windows.errors import CacheError, InputError
from rag_windows.passage import Passage


@dataclass(frozen=True, slots=True)
class Record:
    """A passage as a book keeps it.

    Attributes:
        passage: with an id.
        keys: its windows' keys in the cache; not written, they follow from the text.
        hits: how many searches it was among the results of.
        since: searches of the book when the passage came.
        used: number of the last search that found it; `since` if none did.
    """

    passage: Passage
    keys: tuple[str, ...] = ()
    hits: int = 0
    since: int = 0
    used: int = 0

    def usefulness(self, searches: int) -> tuple[float, int]:
        """The share of searches that found it, and the last that did; one hit is granted ahead."""
        return (self.hits + 1) / (searches - self.since + 1), self.used

    def as_json(self) -> dict[str, Any]:
        """What is written of it."""
        passage = self.passage
        return {
            "id": passage.id,
            "text": passage.text,
            "title": passage.title,
            "score": passage.score,
            "metadata": dict(passage.metadata),
            "uses": [self.hits, self.since, self.used],
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Record:
        """Read what `as_json` wrote.

        Raises:
            CacheError: it is something else.
        """
        try:
            hits, since, used = (int(number) for number in value["uses"])
            passage = Passage(
                text=value["text"],
                id=value["id"],
                title=value["title"],
                score=None if value["score"] is None else float(value["score"]),
                metadata=dict(value["metadata"]),
            )
            if passage.id is None:
                raise ValueError("a passage has no id")
        except (KeyError, TypeError, ValueError, InputError) as error:
            raise CacheError(f"A passage in the book's index can't be read: {error}") from error
        return cls(passage, hits=hits, since=since, used=used)


def require_json(passage: Passage) -> None:
    """Refuse a passage that an index can't hold.

    Raises:
        InputError: its metadata are no JSON.
    """
    try:
        written = json.dumps(dict(passage.metadata))
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(
            f"The metadata of passage {passage.id!r} can't be kept in a file: {error}. Give plain "
            "JSON values (strings, numbers, lists, dicts), or a book without path=."
        ) from error
    if json.loads(written) != dict(passage.metadata):
        raise InputError(
            f"The metadata of passage {passage.id!r} would come back changed from a file; use "
            "string keys, lists instead of tuples, and no NaN."
        )
