"""Which passages an example is read with: retrieved, given by the data, or the right ones alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args, runtime_checkable

from rag_windows.errors import DataError, InputError, MissingExtraError, RetrievalError, missing
from rag_windows.evaluation.task import Example, Task
from rag_windows.passage import Passage

if TYPE_CHECKING:
    from rag_windows_retrievers import ConversationalRetriever, DenseRetriever, Encoder, Retriever

Kind = Literal["bm25", "dense", "hybrid", "gold", "given"]
OnEmbedded = Callable[[int, int], None]
"""Told how many passages are embedded, of how many."""

TURNS, WEIGHT = 3, 3
"""Of `last_turns`: how the conversation becomes a query. They stand in the manifest."""

_DENSE = ("dense", "hybrid")
_SEARCHING = ("bm25", *_DENSE)


@runtime_checkable
class HasGold(Protocol):
    """A task that holds the texts of its evidence."""

    def gold(self, example: Example) -> Sequence[Passage]:
        """The passages that any right answer to the example rests on."""
        ...


class Ranker:
    """Example -> passages, best first, the conversation being the query.

    Arguments are checked here; indexes are built by `prepare`, or at the first example.

    Args:
        task: whose pool is searched.
        kind: "bm25", "dense", "hybrid" (both, by reciprocal rank fusion), "gold" (the evidence of
            the example alone, in the data's order) or "given" (the example's own passages).
        depth: how many passages an example gets at most; None for all that there are, which only
            "gold" and "given" know.
        embedder: of "dense" and "hybrid": a sentence-transformers name or folder, or an `Encoder`.

    Raises:
        InputError: a kind that the task can't serve, or an embedder that is missing.
        MissingExtraError: a package that the kind needs is not installed.
    """

    def __init__(
        self,
        task: Task,
        kind: Kind = "bm25",
        depth: int | None = 20,
        *,
        embedder: Encoder | str | Path | None = None,
    ) -> None:
        self.kind, self.depth = kind, depth
        self._task, self._embedder = task, embedder
        self._retriever: ConversationalRetriever | None = None
        if problem := self._problem():
            raise InputError(problem)
        named = isinstance(embedder, str | Path)
        if kind in _DENSE and named and find_spec("sentence_transformers") is None:
            raise MissingExtraError(
                missing(f"--retriever {kind}", "sentence-transformers", "retrievers")
            )

    def _problem(self) -> str | None:
        """Why this kind can't be served, or None."""
        kind, task = self.kind, self._task
        if kind not in get_args(Kind):
            return f"--retriever {kind!r} is none of {', '.join(get_args(Kind))}."
        if self.depth is not None and self.depth < 1:
            return f"--top-k must be at least 1, not {self.depth}."
        if kind == "given":
            bare = next((one.key for one in task.examples if one.passages is None), None)
            return (
                bare and f"{task.name} brings no passages for {bare!r}; choose another retriever."
            )
        if kind == "gold":
            return (
                None
                if isinstance(task, HasGold)
                else (
                    f"{task.name} does not tell which passages are right, so --retriever gold has "
                    "nothing to read."
                )
            )
        if not task.pool:
            return f"{task.name} has no pool of passages to search; --retriever {kind} needs one."
        if self.depth is None:
            return f"--retriever {kind} needs a number of passages: --top-k."
        if kind == "bm25" and self._embedder is not None:
            return "--embedder is of --retriever dense and hybrid; leave it out."
        if kind in _DENSE and self._embedder is None:
            return (
                f"--retriever {kind} needs --embedder: the name or folder of a "
                "sentence-transformers model, such as sentence-transformers/all-MiniLM-L6-v2."
            )
        return None

    @property
    def settings(self) -> dict[str, Any]:
        """What the rankings depend on beside the task, for the manifest."""
        told: dict[str, Any] = {"retriever": self.kind, "depth": self.depth}
        if self.kind in _SEARCHING:
            told["query"] = {"turns": TURNS, "weight": WEIGHT}
        if self.kind in _DENSE:
            told["embedder"] = getattr(self._embedder, "name", None) or str(self._embedder)
        return told

    def prepare(self, on_embedded: OnEmbedded | None = None, index: Path | None = None) -> None:
        """Build or open the indexes; a second call does nothing.

        Args:
            on_embedded: called while passages are embedded.
            index: folder where the vectors are kept, so that a run that goes on embeds nothing
                again; None to keep none.

        Raises:
            RetrievalError: the pool holds nothing to search, or the index folder can't be written.
            ModelLoadError: the embedder can't be loaded.
            DataError: vectors that can't be used.
        """
        if self._retriever is not None or self.kind not in _SEARCHING:
            return
        from rag_windows_retrievers import (
            BM25Retriever,
            ConversationalRetriever,
            HybridRetriever,
            last_turns,
        )

        pool = self._task.pool or ()
        found: list[Retriever] = []
        if self.kind in ("bm25", "hybrid"):
            found.append(BM25Retriever(pool))
        if self.kind in _DENSE:
            found.append(self._dense(pool, on_embedded, index))
        deep = max(100, self.depth or 0)
        retriever = found[0] if len(found) == 1 else HybridRetriever(found, depth=deep)
        self._retriever = ConversationalRetriever(retriever, last_turns(TURNS, weight=WEIGHT))

    def __call__(self, example: Example) -> list[Passage]:
        """The passages of an example: at most ``depth``; fewer where fewer are found or given."""
        if self.kind == "given":
            return list(example.passages or ())[: self.depth]
        if isinstance(self._task, HasGold) and self.kind == "gold":
            return list(self._task.gold(example))[: self.depth]
        self.prepare()
        if self._retriever is None or self.depth is None:
            return []
        return self._retriever.retrieve(example.conversation, self.depth)

    def _dense(
        self, pool: Sequence[Passage], on_embedded: OnEmbedded | None, index: Path | None
    ) -> DenseRetriever:
        from rag_windows_retrievers import DenseRetriever, SentenceEncoder

        given = self._embedder
        if given is None:
            raise InputError(f"--retriever {self.kind} needs --embedder.")
        encoder = SentenceEncoder(given) if isinstance(given, str | Path) else given
        if index is None or not index.exists():
            made = DenseRetriever(pool, encoder, progress=on_embedded)
        else:
            try:
                known = DenseRetriever.load(index, encoder)
            except RetrievalError as error:
                raise DataError(
                    f"The vectors kept in {str(index)!r} can't be used: {error} Delete that "
                    "folder to embed the passages anew."
                ) from error
            made = known.updated(pool, progress=on_embedded)
            if not made.embedded and known.passages == made.passages:
                return made
        if index is not None:
            made.save(index)
        return made
