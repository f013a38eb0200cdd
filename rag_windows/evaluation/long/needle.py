"""A question, the passage that answers it, and others that don't."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rag_windows.passage import Passage


@dataclass(frozen=True, slots=True)
class Needle:
    """A question with its passage among others.

    Attributes:
        key: unique in its source.
        question: what is asked.
        answers: any of them is right.
        passage: the one that answers it.
        haystack: others, of which the first are read; none has the needle's text.
    """

    key: str
    question: str
    answers: tuple[str, ...]
    passage: Passage
    haystack: tuple[Passage, ...]


@dataclass(frozen=True, slots=True)
class Needles:
    """What a sweep asks.

    Attributes:
        source: name of where they come from.
        needles: each with the same number of others, at least as many as the sweep reads.
        stamp: what a manifest keeps of the source. JSON.
        prefix: an instruction that suits them, or None.
    """

    source: str
    needles: tuple[Needle, ...]
    stamp: dict[str, object]
    prefix: str | None = None


def others(
    pool: Sequence[Passage], count: int, seed: str, fits: Callable[[Passage], bool]
) -> tuple[Passage, ...]:
    """So many passages of a pool, drawn by a seed, in the order of the draw.

    The first n of them are the same whatever the count is. Of equal texts only one is drawn, since
    the engine reads them once.

    Returns:
        Fewer where fewer fit.
    """
    made: list[Passage] = []
    texts: set[str] = set()
    for index in random.Random(seed).sample(range(len(pool)), len(pool)):
        if len(made) == count:
            break
        passage = pool[index]
        if passage.text not in texts and fits(passage):
            texts.add(passage.text)
            made.append(passage)
    return tuple(made)


def digest(passages: Sequence[Passage]) -> str:
    """SHA-256 of titles and texts in order, in hexadecimal digits."""
    made = hashlib.sha256()
    for one in passages:
        made.update(json.dumps([one.title, one.text]).encode())
    return made.hexdigest()
