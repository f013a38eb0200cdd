"""Which passages an example is read with: retrieved, given by the data, or the right ones alone."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from rag_windows.errors import InputError, MissingExtraError, missing
from rag_windows.evaluation.inscit import InscitTask
from rag_windows.evaluation.task import Example, Task
from rag_windows.passage import Passage

if TYPE_CHECKING:
    from rag_windows_retrievers import ConversationalRetriever, Encoder, Retriever

Kind = Literal["bm25", "dense", "hybrid", "gold", "given"]

TURNS, WEIGHT = 3, 3
"""Of `last_turns`: how the conversation becomes a query. They stand in the manifest."""


class Ranker:
    """Example -> passages, best first, the conversation being the query.

    Args:
        task: whose pool is searched.
        kind: "bm25", "dense", "hybrid" (both, by reciprocal rank fusion), "gold" (the evidence of
            an INSCIT example alone, in the data's order) or "given" (the example's own passages).
        depth: how many passages an example gets at most; None for all that are given.
        embedder: of "dense" and "hybrid": a sentence-transformers name or folder, or an `Encoder`.
    """

    def __init__(
        self,
        task: Task,
        kind: Kind = "bm25",
        depth: int | None = 20,
        *,
        embedder: Encoder | str | None = None,
    ) -> None:
        if (embedder is None) == (kind in ("dense", "hybrid")):
            raise InputError(
                f"--retriever {kind} {'needs' if embedder is None else 'has no'} --embedder: the "
                "name or folder of a sentence-transformers model, for dense and hybrid."
            )
        if isinstance(embedder, str) and find_spec("sentence_transformers") is None:
            raise MissingExtraError(
                missing(f"--retriever {kind}", "sentence-transformers", "retrievers")
            )
        self.kind, self.depth = kind, depth
        self._task, self._embedder = task, embedder
        self._retriever: ConversationalRetriever | None = None

    @property
    def settings(self) -> dict[str, Any]:
        """What the rankings depend on beside the task, for the manifest."""
        told: dict[str, Any] = {"retriever": self.kind, "depth": self.depth}
        if self.kind not in ("gold", "given"):
            told["query"] = {"turns": TURNS, "weight": WEIGHT}
        if self._embedder is not None:
            told["embedder"] = getattr(self._embedder, "name", self._embedder)
        return told

    def prepare(
        self, on_embedded: Callable[[int, int], None] | None = None, index: Path | None = None
    ) -> None:
        """Build the indexes; a second call does nothing.

        Vectors are kept in the folder ``index``, so that a run that goes on embeds nothing again.
        """
        if self._retriever is not None or self.kind in ("gold", "given"):
            return
        from rag_windows_retrievers import (
            BM25Retriever,
            ConversationalRetriever,
            DenseRetriever,
            HybridRetriever,
            last_turns,
        )

        pool = self._task.pool or ()
        found: list[Retriever] = []
        if self.kind != "dense":
            found.append(BM25Retriever(pool))
        if self._embedder is not None and index is not None and any(index.glob("*.safetensors")):
            found.append(DenseRetriever.load(index, self._embedder))
        elif self._embedder is not None:
            made = DenseRetriever(pool, self._embedder, progress=on_embedded)
            found.append(made)
            if index is not None:
                made.save(index)
        deep = max(100, self.depth or 0)
        retriever = found[0] if len(found) == 1 else HybridRetriever(found, depth=deep)
        self._retriever = ConversationalRetriever(retriever, last_turns(TURNS, weight=WEIGHT))

    def __call__(self, example: Example) -> list[Passage]:
        """The passages of an example: at most ``depth``; fewer where fewer are found or given."""
        if self.kind == "given":
            return list(example.passages or ())[: self.depth]
        if self.kind == "gold":
            return list(cast(InscitTask, self._task).gold(example))[: self.depth]
        self.prepare()
        if self._retriever is None or self.depth is None:
            return []
        return self._retriever.retrieve(example.conversation, self.depth)
