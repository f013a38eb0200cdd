"""A ranking read again by a model that sees query and passage together."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rag_windows import Passage
from rag_windows.errors import InputError
from rag_windows_retrievers.encoder import SentenceModel
from rag_windows_retrievers.retriever import (
    DEFAULT_K,
    Retriever,
    ScoredPassage,
    best,
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
        InputError: the model has several outputs or a very short input, or an argument is out of
            its range.
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
        self._reader = SentenceModel("CrossEncoder", model, revision, device)
        outputs, longest = self._reader.model.num_labels, self._reader.limit
        # Of query and passage, each counted with a lone text's special tokens.
        special = 2 * self._reader.length("a") - self._reader.length("a", "a")
        self._limit = None if longest is None else longest + special
        if outputs != 1 or (self._limit is not None and self._limit < _SMALLEST):
            raise InputError(
                f"This cross-encoder has {outputs} outputs and reads {longest} tokens at once; "
                "choose one for ranking, with one output and room for a query and a passage."
            )

    def retrieve(self, query: str, k: int = DEFAULT_K) -> list[ScoredPassage]:
        """Ask the retriever and order what it found; see `Retriever.retrieve`."""
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
        check_k(1 if k is None else k)
        if not passages:
            return []
        reader, limit = self._reader, self._limit
        asked = reader.parts(query, None if limit is None else limit // 2)
        room = None if limit is None else limit - max(map(reader.length, asked))
        read = [reader.parts(ranked_text(one), room) for one in passages]
        pairs = [(part, text) for texts in read for part in asked for text in texts]
        with reader.lock:
            found = reader.model.predict(
                pairs, batch_size=self._batch_size, show_progress_bar=False, convert_to_numpy=True
            )
        scores = iter(found.tolist())
        means = [
            statistics.fmean(max(next(scores) for _ in texts) for _ in asked) for texts in read
        ]
        return best(passages, means, k)
