"""Which passages an example is read with: retrieved, given by the data, or the right ones alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from rag_windows.errors import InputError, MissingExtraError, missing
from rag_windows.evaluation.inscit import InscitTask
from rag_windows.evaluation.task import Example, Task
from rag_windows.passage import Passage

if TYPE_CHECKING:
    from rag_windows_retrievers import Encoder, Retriever

TURNS, WEIGHT = 3, 3
"""Of `last_turns`: how the conversation becomes a query. They stand in the manifest."""


@dataclass(frozen=True, slots=True)
class Search:
    """How passages are found, at most ``depth`` of them; None for all that are given.

    "gold" is the evidence of an INSCIT example alone, "given" are the example's own passages,
    "hybrid" is BM25 and dense search by reciprocal rank fusion. Dense search needs an embedder: a
    sentence-transformers name or folder, or an `Encoder`.
    """

    kind: Literal["bm25", "dense", "hybrid", "gold", "given"] = "bm25"
    depth: int | None = 20
    embedder: Encoder | str | None = None

    def __post_init__(self) -> None:
        option = f"--retriever {self.kind}"
        if (self.embedder is None) == (self.kind in ("dense", "hybrid")):
            raise InputError(
                f"{option} {'needs' if self.embedder is None else 'has no'} --embedder: the name "
                "or folder of a sentence-transformers model, for dense and hybrid."
            )
        if isinstance(self.embedder, str) and find_spec("sentence_transformers") is None:
            raise MissingExtraError(missing(option, "sentence-transformers", "retrievers"))

    @property
    def settings(self) -> dict[str, Any]:
        """What the rankings depend on beside the task, for the manifest."""
        told: dict[str, Any] = {"retriever": self.kind, "depth": self.depth}
        if self.kind not in ("gold", "given"):
            told["query"] = {"turns": TURNS, "weight": WEIGHT}
        if self.embedder is not None:
            told["embedder"] = getattr(self.embedder, "name", self.embedder)
        return told

    def over(
        self, task: Task, index: Path, on_embedded: Callable[[int, int], None] | None = None
    ) -> Callable[[Example], Sequence[Passage]]:
        """Gives an example's passages, best first, the conversation being the query.

        Vectors are kept in the folder ``index``, so that a run that goes on embeds nothing again.
        """
        depth = self.depth
        if self.kind == "given":
            return lambda example: (example.passages or ())[:depth]
        if self.kind == "gold":
            return lambda example: cast(InscitTask, task).gold(example)[:depth]
        from rag_windows_retrievers import (
            BM25Retriever,
            ConversationalRetriever,
            DenseRetriever,
            HybridRetriever,
            last_turns,
        )

        found: list[Retriever] = []
        pool = task.pool or ()
        if self.kind != "dense":
            found.append(BM25Retriever(pool))
        if self.embedder is not None and any(index.glob("*.safetensors")):
            found.append(DenseRetriever.load(index, self.embedder))
        elif self.embedder is not None:
            made = DenseRetriever(pool, self.embedder, progress=on_embedded)
            made.save(index)
            found.append(made)
        most = depth or 0
        retriever = found[0] if len(found) == 1 else HybridRetriever(found, depth=max(100, most))
        conversational = ConversationalRetriever(retriever, last_turns(TURNS, weight=WEIGHT))
        return lambda example: conversational.retrieve(example.conversation, most)
