"""A ranking read again by a model that sees query and passage together."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rag_windows import Passage
from rag_windows.errors import InputError
from rag_windows.threads import Lock
from rag_windows_retrievers.encoder import count_tokens, fitting_parts, load_model
from rag_windows_retrievers.retriever import (
    DEFAULT_K,
    Retriever,
    ScoredPassage,
    check_k,
    ranked_text,
)

if TYPE_CHECKING:
    from sentence_transformers import CrossEncoder

_SMALLEST = 16
"""Tokens below which a model's input is too short to hold a query and a passage."""


class Reranker:
    """Orders what another retriever found by a cross-encoder's scores.

    Where query and passage together are longer than the model reads, the query takes half of its
    input at most, and both are read in parts: a passage scores by its best part, and by the mean
    over the query's parts. Weights come from safetensors files only; no code of a repository is
    run. Threads may share it.

    Args:
        retriever: finds the candidates.
        model: a local folder, a name on the Hub, or a loaded `CrossEncoder` with one output.
        candidates: how many to ask for, where `k` is not more.
        batch_size: pairs in one pass.
        revision: of the model on the Hub; None for its main one.
        device: "cpu", "cuda", ...; None for the best there is.

    Raises:
        ModelLoadError: the model is not found or can't be loaded.
        InputError: the model has several outputs, or an argument is out of its range.
        MissingExtraError: `sentence-transformers` is not installed.
    """

    def __init__(
        self,
        retriever: Retriever,
        model: str | Path | CrossEncoder,
        *,
        candidates: int = 50,
        batch_size: int = 32,
        revision: str | None = None,
        device: str | None = None,
    ) -> None:
        if candidates < 1 or batch_size < 1:
            raise InputError(
                f"candidates and batch_size must be at least 1, not {candidates} and {batch_size}."
            )
        self.retriever, self.candidates = retriever, candidates
        self._batch_size = batch_size
        # The tokenizer's padding and truncation are states: one thread at a time may set them.
        self._lock = Lock()
        self._model: Any = load_model("CrossEncoder", model, revision, device)
        outputs = self._model.num_labels
        if outputs != 1:
            raise InputError(
                f"A reranker needs a cross-encoder with one output, and this one has {outputs}; "
                "choose one that was trained for ranking."
            )

    def retrieve(self, query: str, k: int = DEFAULT_K) -> list[ScoredPassage]:
        """Ask the retriever and order what it found; see `Retriever.retrieve`.

        Raises:
            InputError: `k` is below 1.
        """
        check_k(k)
        return self.rerank(query, self.retriever.retrieve(query, max(k, self.candidates)), k)

    def rerank(
        self, query: str, passages: Sequence[Passage], k: int | None = None
    ) -> list[ScoredPassage]:
        """Order passages, wherever they come from.

        Args:
            query: what they should answer.
            passages: any; equal scores keep their order.
            k: how many to keep; None for all.

        Returns:
            Passages, best first, with the model's scores.
        """
        if k is not None:
            check_k(k)
        if not passages:
            return []
        limit = self._limit()
        asked = fitting_parts(query, "", self._length, None if limit is None else limit // 2)
        longest = max(self._length(part) for part in asked)
        room = None if limit is None else limit - longest
        read = [fitting_parts(ranked_text(one), "", self._length, room) for one in passages]
        pairs = [(part, text) for texts in read for part in asked for text in texts]
        scores = iter(self._score(pairs))
        means = [
            sum(max(itertools.islice(scores, len(texts))) for _ in asked) / len(asked)
            for texts in read
        ]
        best = sorted(range(len(passages)), key=lambda number: -means[number])[:k]
        return [dataclasses.replace(passages[i], score=means[i]) for i in best]

    def _score(self, pairs: list[tuple[str, str]]) -> list[float]:
        with self._lock:
            found = self._model.predict(
                pairs, batch_size=self._batch_size, show_progress_bar=False, convert_to_numpy=True
            )
        return [float(score) for score in found]

    def _limit(self) -> int | None:
        """Tokens for query and passage, each counted with a text's special tokens."""
        longest = self._model.max_seq_length
        if longest is None or longest >= 10**9:
            return None
        limit = int(longest) - self._length("a", "a") + 2 * self._length("a")
        if limit < _SMALLEST:
            raise InputError(
                f"The cross-encoder reads {longest} tokens at once, too few for a query and a "
                "passage; choose one with a longer input."
            )
        return limit

    def _length(self, *texts: str) -> int:
        with self._lock:
            return count_tokens(self._model, *texts)
