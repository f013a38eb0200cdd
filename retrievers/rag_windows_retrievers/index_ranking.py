"""How an index ranks its passages: by words and by meaning."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from rag_windows import Passage
from rag_windows.errors import InputError
from rag_windows_retrievers import index_tables as tables
from rag_windows_retrievers.in_memory import Vectors
from rag_windows_retrievers.retriever import (
    BLANK_LINE,
    DEFAULT_K,
    ScoredPassage,
    check_k,
    content,
    ranked_text,
)
from rag_windows_retrievers.words import FUNCTION_WORDS, tokenize

if TYPE_CHECKING:
    import apsw

    from rag_windows_retrievers.index import Index

Where: TypeAlias = Callable[[Passage], bool]
"""Which passages may be found at all."""


_MOST_NEAREST = 4096
"""Vectors that sqlite-vec finds at most."""


CANDIDATES = 200
"""Passages that a question's words are counted in, at least."""


_K1, _B = 1.5, 0.75


class ByWords:
    """Okapi BM25 of an `Index`, in Lucene's variant, as `BM25Retriever` has it.

    English function words in a question are ignored as long as another word of it is known. A word
    that stands in a question twice counts twice. Passages that share no word with it are not found.
    SQLite's own ranking, which gives nothing for words that half of all passages have, chooses
    `CANDIDATES` passages or more, which are ranked anew.
    """

    def __init__(self, index: Index) -> None:
        self._index = index

    def retrieve(
        self, query: str, k: int = DEFAULT_K, where: Where | None = None
    ) -> list[ScoredPassage]:
        """Rank the passages that share a word with the query; see `Index.retrieve`."""
        check_k(k)
        words = Counter(tokenize(query))
        with self._index.reading() as connection:
            known = {word: n for word in words if (n := tables.passages_with(connection, word))}
            telling = known.keys() - FUNCTION_WORDS or known.keys()
            if not telling:
                return []
            asked = " OR ".join(f'"{word}"' for word in words if word in telling)
            numbers = [
                int(tables.setting(connection, name) or 0) for name in ("passages", "length")
            ]
            weights = {
                word: words[word]
                * math.log1p((numbers[0] - known[word] + 0.5) / (known[word] + 0.5))
                for word in telling
            }
            usual = numbers[1] / max(1, numbers[0])

            def ranked(most: int) -> list[tuple[int, float]]:
                rows = tables.select(
                    connection,
                    "SELECT rowid, title, text, length FROM passages WHERE number IN "
                    "(SELECT rowid FROM words WHERE words MATCH ? ORDER BY rank, rowid LIMIT ?)",
                    (asked, max(CANDIDATES, 4 * most)),
                )
                found = []
                for number, title, text, length in rows:
                    counts = Counter(tokenize(ranked_text(Passage(text, title=title))))
                    norm = _K1 * (1 - _B + _B * length / usual)
                    score = sum(
                        weight * counts[word] / (counts[word] + norm)
                        for word, weight in weights.items()
                    )
                    found.append((number, score))
                return sorted(found, key=lambda one: (-one[1], one[0]))[:most]

            return _distinct(connection, ranked, k, where)


class ByMeaning:
    """Passages of an `Index` whose vectors lie nearest to the query's; every vector is compared.

    The score is the cosine, or the dot product for a model made for it. A query of several
    paragraphs asks with the mean of their vectors. Blank passages are never found.
    """

    def __init__(self, index: Index) -> None:
        self._index = index

    def retrieve(
        self, query: str, k: int = DEFAULT_K, where: Where | None = None
    ) -> list[ScoredPassage]:
        """Rank the passages by their nearness to the query; see `Index.retrieve`."""
        check_k(k)
        paragraphs = [one for one in BLANK_LINE.split(query) if one.strip()]
        if not paragraphs or self._index.encoder is None:
            return []
        asked = self._index.encoder.embed(paragraphs, query=True).mean(axis=0)
        return self.nearest(asked, k, where)

    def nearest(
        self, vector: Sequence[float] | Vectors, k: int = DEFAULT_K, where: Where | None = None
    ) -> list[ScoredPassage]:
        """Rank the passages by their nearness to a vector.

        Raises:
            InputError: it has another length than those of the index, or `k` is below 1.
        """
        check_k(k)
        index, asked = self._index, np.asarray(vector, dtype=np.float32)
        with index.reading() as connection:
            dimension = tables.setting(connection, "dimension")
            if dimension is None:
                return []
            if asked.shape != (int(dimension),) or not np.isfinite(asked).all():
                raise InputError(
                    f"A vector for this index has {dimension} finite numbers, not the shape "
                    f"{asked.shape}. Use the embedding model that made those of the index."
                )
            if not index.dot:
                norm = np.linalg.norm(asked)
                if not norm:
                    return []
                asked = (asked / norm).astype(np.float32)

            def ranked(most: int) -> list[tuple[int, float]]:
                if not index.dot and most <= _MOST_NEAREST:
                    found = tables.select(
                        connection,
                        "SELECT rowid, (1 - distance) * ? FROM vectors "
                        "WHERE embedding MATCH ? AND k = ?",
                        (float(np.linalg.norm(asked)), asked.tobytes(), most),
                    )
                else:
                    rows = tables.select(connection, "SELECT rowid, embedding FROM vectors")
                    found = [(n, float(np.frombuffer(one, np.float32) @ asked)) for n, one in rows]
                return sorted(found, key=lambda one: (-one[1], one[0]))[:most]

            return _distinct(connection, ranked, k, where)


def _distinct(
    connection: apsw.Connection,
    ranked: Callable[[int], list[tuple[int, float]]],
    k: int,
    where: Where | None,
) -> list[ScoredPassage]:
    """The first k passages of different title and text, of those that may be found."""
    most = k
    while True:
        rows = ranked(most)
        found: dict[tuple[str | None, str], ScoredPassage] = {}
        numbers = [number for number, _ in rows]
        for one, (_, score) in zip(tables.passages_at(connection, numbers), rows, strict=True):
            if where is None or where(one):
                found.setdefault(content(one), replace(one, score=float(score)))
        if len(found) >= k or len(rows) < most:
            return list(found.values())[:k]
        most *= 2
