"""What every retriever promises, and several of them as one."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np

from rag_windows import Passage
from rag_windows.errors import InputError

DEFAULT_K = 8

ScoredPassage: TypeAlias = Passage
"""A `Passage` whose `score` is set, as `WindowedLM.generate` takes it."""


@runtime_checkable
class Retriever(Protocol):
    """Anything that finds passages for a query.

    Every retriever of this package finds at most `k` passages, best first. Their `score` is finite
    and has a unit of the retriever's own; the rest of a passage is as it was given. A blank query
    finds nothing. Threads may share a retriever.
    """

    def retrieve(self, query: str, k: int = DEFAULT_K) -> list[ScoredPassage]:
        """Find passages.

        Args:
            query: what to look for.
            k: how many passages at most, at least 1; may exceed the corpus.

        Raises:
            InputError: `k` is below 1.
        """
        ...


def check_k(k: int) -> None:
    """Refuse a number of passages below 1 with an `InputError`."""
    if k < 1:
        raise InputError(f"k must be at least 1, not {k}.")


def best(
    passages: Sequence[Passage], scores: Any, k: int | None, *, above: float = -math.inf
) -> list[ScoredPassage]:
    """The first `k` by their score, of those above a score; equal ones keep their order."""
    scores = np.asarray(scores)
    order = np.argsort(-scores, kind="stable")[:k].tolist()
    return [
        dataclasses.replace(passages[i], score=float(scores[i])) for i in order if scores[i] > above
    ]


def ranked_text(passage: Passage) -> str:
    """What a passage is found by: its title, where it has one, above its text."""
    return f"{passage.title}\n{passage.text}" if passage.title else passage.text


class HybridRetriever:
    """Reciprocal rank fusion of several retrievers.

    A passage scores ``sum over retrievers of weight / (constant + rank)``, ranks from 1 on, over
    those retrievers that found it among their first `depth` (Cormack, Clarke and Büttcher,
    SIGIR 2009, https://doi.org/10.1145/1571941.1572114, with weights added). Equal scores keep the
    order of the retrievers; what several found comes as the first of them gave it.

    Args:
        retrievers: one or more, such as a `BM25Retriever` and a `DenseRetriever` over one corpus.
        weights: one for each, above 0; equal ones where none are given.
        constant: how little the first ranks count above later ones, at least 0.
        depth: how many passages each is asked for, where `k` is not more.

    Raises:
        InputError: an argument is out of its range.
    """

    def __init__(
        self,
        retrievers: Sequence[Retriever],
        *,
        weights: Sequence[float] | None = None,
        constant: float = 60.0,
        depth: int = 100,
    ) -> None:
        self.retrievers = tuple(retrievers)
        self.weights = (1.0,) * len(self.retrievers) if weights is None else tuple(weights)
        self.constant, self.depth = constant, depth
        if not self.retrievers or len(self.weights) != len(self.retrievers):
            raise InputError(
                f"{len(self.retrievers)} retrievers and {len(self.weights)} weights can't be fused;"
                " name at least one retriever, and as many weights."
            )
        if not all(0 < weight < math.inf for weight in self.weights):
            raise InputError(f"Weights must be above 0 and finite, not {list(self.weights)}.")
        if not (0 <= constant < math.inf and depth >= 1):
            raise InputError(
                f"constant must be at least 0 and depth at least 1, not {constant} and {depth}."
            )

    def retrieve(self, query: str, k: int = DEFAULT_K) -> list[ScoredPassage]:
        """Ask every retriever and fuse; see `Retriever.retrieve`."""
        check_k(k)
        found: dict[object, ScoredPassage] = {}
        scores: dict[object, float] = {}
        for retriever, weight in zip(self.retrievers, self.weights, strict=True):
            ranks: dict[object, int] = {}
            for one in retriever.retrieve(query, max(k, self.depth)):
                # An id alone would do only if nobody ever gave one id to two texts.
                key = (one.id, one.title, one.text)
                found.setdefault(key, one)
                ranks.setdefault(key, len(ranks) + 1)
            for name, rank in ranks.items():
                scores[name] = scores.get(name, 0.0) + weight / (self.constant + rank)
        return best(list(found.values()), list(scores.values()), k)
