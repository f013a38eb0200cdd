"""Several rankings as one."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence

from rag_windows.errors import InputError
from rag_windows_retrievers.retriever import (
    DEFAULT_K,
    Retriever,
    ScoredPassage,
    check_k,
    identity,
)


class HybridRetriever:
    """Reciprocal rank fusion of several retrievers.

    A passage scores ``sum over retrievers of weight / (constant + rank)``, ranks from 1 on, over
    those retrievers that found it among their first `depth` (Cormack, Clarke and Büttcher,
    SIGIR 2009, https://doi.org/10.1145/1571941.1572114, with weights added). The retrievers' own
    scores, which have different units, play no part. Equal scores keep the order of the retrievers.

    Args:
        retrievers: two or more, such as a `BM25Retriever` and a `DenseRetriever` over one corpus.
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
        if not self.retrievers:
            raise InputError("Name the retrievers whose rankings are to be fused.")
        if len(self.weights) != len(self.retrievers):
            raise InputError(
                f"{len(self.retrievers)} retrievers need as many weights, not {len(self.weights)}."
            )
        if not all(0 < weight < float("inf") for weight in self.weights):
            raise InputError(f"Weights must be above 0 and finite, not {list(self.weights)}.")
        if not 0 <= constant < float("inf"):
            raise InputError(f"The constant must be at least 0 and finite, not {constant}.")
        if depth < 1:
            raise InputError(f"depth must be at least 1, not {depth}.")

    def retrieve(self, query: str, k: int = DEFAULT_K) -> list[ScoredPassage]:
        """Ask every retriever and fuse; see `Retriever.retrieve`.

        A passage that several found comes as the first of them gave it, with the fused score.

        Raises:
            InputError: `k` is below 1.
        """
        check_k(k)
        found: dict[Hashable, ScoredPassage] = {}
        scores: dict[Hashable, float] = {}
        for retriever, weight in zip(self.retrievers, self.weights, strict=True):
            ranked = dict.fromkeys(map(identity, hits := retriever.retrieve(query, self._depth(k))))
            for passage in hits:
                found.setdefault(identity(passage), passage)
            for rank, name in enumerate(ranked, start=1):
                scores[name] = scores.get(name, 0.0) + weight / (self.constant + rank)
        best = sorted(scores, key=lambda name: -scores[name])[:k]
        return [dataclasses.replace(found[name], score=scores[name]) for name in best]

    def _depth(self, k: int) -> int:
        return max(k, self.depth)
