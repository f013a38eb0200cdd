"""Which passages an example is read with: retrieved, given by the data, or the right ones alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args, runtime_checkable

from rag_windows.errors import DataError, InputError, MissingExtraError, RetrievalError, missing
from rag_windows.evaluation.example import Example
from rag_windows.evaluation.task import Task
from rag_windows.passage import Passage

if TYPE_CHECKING:
    from rag_windows_retrievers import ConversationalRetriever, Encoder, Retriever

    Embedder = Encoder | str | Path

Kind = Literal["bm25", "dense", "hybrid", "gold", "given"]
OnEmbedded = Callable[[int, int], None]
"""Told how many passages are embedded, of how many."""

TURNS, WEIGHT = 3, 3
"""Of `last_turns`: how the conversation becomes a query. They stand in the manifest."""

_SEARCHING: tuple[Kind, ...] = ("bm25", "dense", "hybrid")


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
        embedder: Embedder | None = None,
    ) -> None:
        self.kind, self.depth = kind, depth
        self._task, self._embedder = task, embedder
        self._retriever: ConversationalRetriever | None = None
        self._check()

    @property
    def settings(self) -> dict[str, Any]:
        """What the rankings depend on beside the task, for the manifest."""
        told: dict[str, Any] = {"retriever": self.kind, "depth": self.depth}
        if self.kind in _SEARCHING:
            told["query"] = {"turns": TURNS, "weight": WEIGHT}
        if self.kind in ("dense", "hybrid"):
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
        """
        if self._retriever is None and self.kind in _SEARCHING:
            from rag_windows_retrievers import ConversationalRetriever, last_turns

            condense = last_turns(TURNS, weight=WEIGHT)
            self._retriever = ConversationalRetriever(self._searching(on_embedded, index), condense)

    def __call__(self, example: Example) -> list[Passage]:
        """The passages of an example.

        Returns:
            At most ``depth``; fewer where fewer are found, given or right, down to none.
        """
        if self.kind == "given":
            return list(example.passages or ())[: self.depth]
        if self.kind == "gold":
            return list(self._gold(example))[: self.depth]
        self.prepare()
        # A style may word the question as an instruction, which is no part of the search.
        conversation = example.details.get("conversation", example.messages)
        if self._retriever is None or self.depth is None:
            return []
        return self._retriever.retrieve(conversation, self.depth)

    def _check(self) -> None:
        kind, task = self.kind, self._task
        if kind not in get_args(Kind):
            raise InputError(f"--retriever {kind!r} is none of {', '.join(get_args(Kind))}.")
        if self.depth is not None and self.depth < 1:
            raise InputError(f"--top-k must be at least 1, not {self.depth}.")
        if kind == "given":
            bare = next((one.key for one in task.examples if one.passages is None), None)
            if bare is not None:
                raise InputError(
                    f"{task.name} brings no passages for {bare!r}; choose another --retriever."
                )
        elif kind == "gold":
            if not isinstance(task, HasGold):
                raise InputError(
                    f"{task.name} does not tell which passages are right, so --retriever gold has "
                    "nothing to read."
                )
        else:
            self._check_search(kind)

    def _check_search(self, kind: Kind) -> None:
        if not self._task.pool:
            raise InputError(
                f"{self._task.name} has no pool of passages to search; --retriever {kind} needs "
                "one."
            )
        if self.depth is None:
            raise InputError(f"--retriever {kind} needs a number of passages: --top-k.")
        if kind == "bm25":
            if self._embedder is not None:
                raise InputError("--embedder is of --retriever dense and hybrid; leave it out.")
        elif self._embedder is None:
            raise InputError(
                f"--retriever {kind} needs --embedder: the name or folder of a "
                "sentence-transformers model, such as sentence-transformers/all-MiniLM-L6-v2."
            )
        named = self._embedder is None or isinstance(self._embedder, str | Path)
        if kind != "bm25" and named and find_spec("sentence_transformers") is None:
            raise MissingExtraError(
                missing(f"--retriever {kind}", "sentence-transformers", "retrievers")
            )

    def _gold(self, example: Example) -> Sequence[Passage]:
        if not isinstance(self._task, HasGold):
            raise InputError(f"{self._task.name} does not tell which passages are right.")
        return self._task.gold(example)

    def _searching(self, on_embedded: OnEmbedded | None, index: Path | None) -> Retriever:
        from rag_windows_retrievers import BM25Retriever, HybridRetriever

        pool = self._task.pool or ()
        if self.kind == "bm25":
            return BM25Retriever(pool)
        dense = self._dense(pool, on_embedded, index)
        if self.kind == "dense":
            return dense
        return HybridRetriever([BM25Retriever(pool), dense], depth=max(100, self.depth or 0))

    def _dense(
        self, pool: Sequence[Passage], on_embedded: OnEmbedded | None, index: Path | None
    ) -> Retriever:
        from rag_windows_retrievers import DenseRetriever, SentenceEncoder

        given = self._embedder
        if given is None:
            raise InputError(f"--retriever {self.kind} needs --embedder.")
        encoder = SentenceEncoder(given) if isinstance(given, str | Path) else given
        if index is None:
            return DenseRetriever(pool, encoder, progress=on_embedded)
        if index.exists():
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
        else:
            made = DenseRetriever(pool, encoder, progress=on_embedded)
        made.save(index)
        return made
