"""What every retriever does, whatever it ranks by."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Protocol, TypeAlias, runtime_checkable

from rag_windows import Passage
from rag_windows.errors import InputError

DEFAULT_K = 8

ScoredPassage: TypeAlias = Passage
"""A `Passage` whose `score` is set.

An alias and no subclass: what a retriever found goes into `WindowedLM.generate` as it is, equals
the passage that a caller builds by hand, and fits wherever a ``list[Passage]`` is asked for.
"""


@runtime_checkable
class Retriever(Protocol):
    """Anything that finds passages for a query.

    Every retriever here keeps these promises, and they are what an adapter or another retriever
    relies on: at most `k` passages, best first; `score` is set, finite, never rising down the
    list, and its unit is the retriever's own; the rest of a passage is as it was given; a blank
    query finds nothing; threads may share a retriever.
    """

    def retrieve(self, query: str, k: int = DEFAULT_K) -> list[ScoredPassage]:
        """Find passages.

        Args:
            query: what to look for.
            k: how many passages at most, at least 1.

        Raises:
            InputError: `k` is below 1.
        """
        ...


def check_k(k: int) -> None:
    """Refuse a number of passages below 1.

    Raises:
        InputError: saying so.
    """
    if k < 1:
        raise InputError(f"k must be at least 1, not {k}.")


def ranked_text(passage: Passage) -> str:
    """What a passage is found by: its title, where it has one, above its text."""
    return f"{passage.title}\n{passage.text}" if passage.title else passage.text


def identity(passage: Passage) -> Hashable:
    """Equal for the same passage found by different retrievers, whatever its score.

    An id alone would do only if nobody ever gave one id to two texts.
    """
    return passage.id, passage.title, passage.text
