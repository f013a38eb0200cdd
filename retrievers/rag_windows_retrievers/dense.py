"""Passages ranked by what they mean, as an embedding model sees it."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from rag_windows.errors import InputError, RetrievalError
from rag_windows.passage import Passage
from rag_windows_retrievers import store
from rag_windows_retrievers.encoder import Encoder, SentenceEncoder
from rag_windows_retrievers.passage_file import read_passages, write_passages
from rag_windows_retrievers.probe import PROBE, check_model
from rag_windows_retrievers.progress import Progress
from rag_windows_retrievers.retriever import DEFAULT_K, ScoredPassage, check_k
from rag_windows_retrievers.rows import Rows, embed_passages, key_of
from rag_windows_retrievers.vectors import Graph

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

    from rag_windows_retrievers.encoder import Vectors

Model: TypeAlias = "Encoder | str | Path | SentenceTransformer"

APPROXIMATE_ABOVE = 100_000

_PARAGRAPH = re.compile(r"\n\s*\n")
_KIND = "dense"
_VECTORS, _GRAPH = "vectors.safetensors", "graph.usearch"


class DenseRetriever:
    """Passages whose vectors lie nearest to the query's.

    Up to `approximate_above` vectors every one is compared; above, a graph (see `Graph`) names
    candidates, which are then compared exactly. The score is the cosine, or the dot product for a
    model made for it. Where the encoder reads less than a whole passage, the passage is embedded in
    parts and its best part counts. A query of several paragraphs asks with the mean of their
    vectors, and a paragraph that is longer than the encoder reads counts as the mean of its parts.
    Blank passages are never found. A retriever is not changed by use.

    Args:
        passages: the corpus.
        model: an `Encoder`, or what `SentenceEncoder` takes.
        approximate_above: number of vectors above which the search is approximate.
        progress: told how many passages are embedded.

    Attributes:
        passages: the corpus.
        encoder: what embeds it.
        embedded: number of passages that were embedded when this retriever was made.

    Raises:
        RetrievalError: no passage holds text.
        InputError, ModelLoadError, MissingExtraError: see `SentenceEncoder`.
    """

    def __init__(
        self,
        passages: Sequence[Passage],
        model: Model,
        *,
        approximate_above: int = APPROXIMATE_ABOVE,
        progress: Progress | None = None,
    ) -> None:
        encoder = encoder_of(model)
        keys = [key_of(one) for one in passages]
        rows, embedded = embed_passages(passages, keys, encoder, {}, progress)
        self._set(tuple(passages), encoder, rows, approximate_above)
        self.embedded = embedded

    def _set(
        self,
        passages: tuple[Passage, ...],
        encoder: Encoder,
        rows: Rows,
        approximate_above: int,
        graph: Graph | None = None,
    ) -> None:
        if not len(rows.vectors):
            raise RetrievalError("There is no text to search; load some documents first.")
        self.passages, self.encoder, self.embedded = passages, encoder, 0
        self._rows, self._approximate_above = rows, approximate_above
        large = len(rows.vectors) > approximate_above
        self._graph = (graph or Graph(rows.vectors)) if large else None

    def updated(
        self, passages: Sequence[Passage], *, progress: Progress | None = None
    ) -> DenseRetriever:
        """A retriever over these passages, which embeds only those that are new or changed.

        Args:
            passages: the whole corpus as it is now; what is missing from it is not found any more.
            progress: told how many passages are embedded.

        Raises:
            RetrievalError: no passage holds text.
        """
        known = self._rows.of([key_of(one) for one in self.passages])
        keys = [key_of(one) for one in passages]
        rows, embedded = embed_passages(passages, keys, self.encoder, known, progress)
        made = type(self).__new__(type(self))
        made._set(tuple(passages), self.encoder, rows, self._approximate_above)
        made.embedded = embedded
        return made

    def retrieve(self, query: str, k: int = DEFAULT_K) -> list[ScoredPassage]:
        """Rank the passages by their nearness to the query; see `Retriever.retrieve`.

        Raises:
            InputError: `k` is below 1.
        """
        check_k(k)
        if not query.strip():
            return []
        best = self._rows.best(self._embed_query(query), k, self._graph)
        return [dataclasses.replace(self.passages[i], score=score) for i, score in best]

    def _embed_query(self, query: str) -> Vectors:
        import numpy as np

        paragraphs = [one for one in _PARAGRAPH.split(query) if one.strip()]
        # A conversation's question comes several times and is embedded once.
        parts = {one: self.encoder.query_parts(one) for one in paragraphs}
        texts = [text for part in parts.values() for text in part]
        vectors = self.encoder.embed(texts, query=True)
        counts = np.asarray([len(part) for part in parts.values()], dtype=np.int64)
        rows = Rows(vectors, counts).of(list(parts))
        mean: Vectors = np.mean([rows[one].mean(axis=0) for one in paragraphs], axis=0)
        return mean

    def save(self, folder: str | Path) -> None:
        """Write passages, vectors and graph into a folder, in place of an index that is there.

        Raises:
            InputError: a passage's metadata can't be written as JSON.
            RetrievalError: the folder can't be written.
        """
        from safetensors.numpy import save_file

        settings = {
            "model": self.encoder.name,
            "revision": self.encoder.revision,
            "dimension": self.encoder.dimension,
            "passages": len(self.passages),
        }
        probe = self.encoder.embed(PROBE, query=False)

        def fill(generation: Path) -> None:
            write_passages(generation, self.passages)
            rows = self._rows
            save_file(
                {"vectors": rows.vectors, "counts": rows.counts, "probe": probe},
                generation / _VECTORS,
            )
            if self._graph is not None:
                (generation / _GRAPH).write_bytes(self._graph.data())

        store.write(Path(folder), _KIND, settings, fill)

    @classmethod
    def load(
        cls,
        folder: str | Path,
        model: Model,
        *,
        approximate_above: int = APPROXIMATE_ABOVE,
    ) -> DenseRetriever:
        """Read what `save` wrote; nothing but a probe is embedded.

        Args:
            folder: given to `save`.
            model: the one that the vectors were made with, wherever it lies now: a few probe texts
                are embedded and compared with what they gave then.
            approximate_above: as in the constructor.

        Raises:
            RetrievalError: there is no dense index, it is damaged, or it holds the vectors of
                another model or revision.
            InputError, ModelLoadError, MissingExtraError: see `SentenceEncoder`.
        """
        encoder = encoder_of(model)

        def open_index(generation: Path, settings: Mapping[str, Any]) -> DenseRetriever:
            from safetensors import SafetensorError
            from safetensors.numpy import load as read_tensors

            # Read, not mapped: a mapped file that someone truncates ends the process.
            try:
                tensors = read_tensors((generation / _VECTORS).read_bytes())
            except SafetensorError as error:
                raise ValueError(str(error)) from error
            check_model(Path(folder), encoder, settings, tensors["probe"])
            passages = read_passages(generation)
            rows = Rows(tensors["vectors"], tensors["counts"])
            _check_rows(rows, encoder.dimension, len(passages), settings["passages"])
            graph = None
            if len(rows.vectors) > approximate_above and (generation / _GRAPH).exists():
                graph = Graph.from_data((generation / _GRAPH).read_bytes(), rows.vectors)
            loaded = cls.__new__(cls)
            loaded._set(passages, encoder, rows, approximate_above, graph)
            return loaded

        return store.read(Path(folder), _KIND, open_index)


def encoder_of(model: Model) -> Encoder:
    """An encoder as it is, and one for a model's name, folder or object."""
    if isinstance(model, Encoder):
        return model
    if isinstance(model, str | Path) or hasattr(model, "encode_document"):
        return SentenceEncoder(model)
    raise InputError(
        "model must be a name, a folder, a SentenceTransformer or an Encoder, "
        f"not {type(model).__name__}."
    )


def _check_rows(rows: Rows, dimension: int, passages: int, expected: int) -> None:
    import numpy as np

    vectors, counts = rows.vectors, rows.counts
    if (
        not passages == len(counts) == expected
        or vectors.dtype != np.float32
        or vectors.ndim != 2
        or vectors.shape[1] != dimension
        or counts.dtype != np.int64
        or (counts < 0).any()
        or counts.sum() != len(vectors)
        or not np.isfinite(vectors).all()
    ):
        raise ValueError("vectors and passages do not fit each other")
