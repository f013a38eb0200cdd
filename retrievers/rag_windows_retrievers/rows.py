"""The vectors of passages: each passage owns none, one or several rows of a matrix."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rag_windows.forks import cached_property
from rag_windows.passage import Passage
from rag_windows_retrievers.encoder import Encoder
from rag_windows_retrievers.progress import Progress
from rag_windows_retrievers.vectors import Graph

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from rag_windows_retrievers.encoder import Vectors
    from rag_windows_retrievers.vectors import Numbers

    Counts = NDArray[np.int64]


@dataclass(frozen=True)
class Rows:
    """Vectors in the order of their passages.

    Attributes:
        vectors: (rows, dimension), float32, C order.
        counts: rows of each passage; blank passages own none.
    """

    vectors: Vectors
    counts: Counts

    @cached_property
    def owners(self) -> Numbers:
        """Number of the passage that owns each row."""
        import numpy as np

        return np.repeat(np.arange(len(self.counts)), self.counts)

    def of(self, keys: Sequence[str]) -> dict[str, Vectors]:
        """Key of a passage -> its rows."""
        borders = [0, *self.counts.cumsum().tolist()]
        spans = itertools.pairwise(borders)
        return {key: self.vectors[start:end] for key, (start, end) in zip(keys, spans, strict=True)}

    def best(self, query: Vectors, k: int, graph: Graph | None) -> list[tuple[int, float]]:
        """The `k` passages nearest to a query: (number, greatest dot product of its rows)."""
        import numpy as np

        if graph is None:
            return self._ranked(self.vectors @ query, self.owners, k)
        wanted = max(4 * k, 64)
        while True:
            near = np.sort(graph.candidates(query, wanted))
            owners = self.owners[near]
            if len(np.unique(owners)) >= k or len(near) < wanted:
                return self._ranked(self.vectors[near] @ query, owners, k)
            wanted *= 2

    def _ranked(self, scores: Vectors, owners: Numbers, k: int) -> list[tuple[int, float]]:
        """From each row's score and owner, in the rows' order."""
        import numpy as np

        firsts = np.flatnonzero(np.diff(owners, prepend=-1))
        greatest = np.maximum.reduceat(scores, firsts)
        order = np.argsort(-greatest, kind="stable")[:k]
        return [(int(owners[firsts[i]]), float(greatest[i])) for i in order.tolist()]


def key_of(passage: Passage) -> str:
    """Equal for passages whose vectors are equal."""
    title = passage.title or ""
    text = f"{len(title)}:{title}{passage.text}"
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def embed_passages(
    passages: Sequence[Passage],
    keys: Sequence[str],
    encoder: Encoder,
    known: Mapping[str, Vectors],
    progress: Progress | None,
) -> tuple[Rows, int]:
    """Vectors of passages, and how many of the passages were embedded.

    Args:
        passages: any.
        keys: of the passages, by `key_of`.
        encoder: embeds what is not known.
        known: key -> rows that the same encoder made before.
        progress: told how many passages are embedded.
    """
    import numpy as np

    new = {
        key: one
        for key, one in zip(keys, passages, strict=True)
        if key not in known and one.text.strip()
    }
    parts = [encoder.passage_parts(one.text, one.title) for one in new.values()]
    texts = [text for texts in parts for text in texts]

    def show(done: int, total: int) -> None:
        if progress is not None:
            progress(done * len(new) // total, len(new))

    vectors = np.zeros((0, encoder.dimension), dtype=np.float32)
    if texts:
        vectors = encoder.embed(texts, query=False, progress=show)
    counts = np.asarray([len(one) for one in parts], dtype=np.int64)
    rows = {**known, **Rows(vectors, counts).of(list(new))}
    nothing = vectors[:0]
    mine = [rows.get(key, nothing) for key in keys]
    together = np.concatenate([nothing, *mine]).astype(np.float32, copy=False)
    return Rows(together, np.asarray([len(one) for one in mine], dtype=np.int64)), len(new)
