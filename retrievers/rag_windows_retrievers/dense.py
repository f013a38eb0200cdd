"""Passages ranked by what they mean, as an embedding model sees it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import numpy as np

from rag_windows import Passage
from rag_windows.errors import InputError, RetrievalError
from rag_windows_retrievers import index_file
from rag_windows_retrievers.encoder import Encoder, Progress, SentenceEncoder, Vectors
from rag_windows_retrievers.retriever import DEFAULT_K, ScoredPassage, best, check_k

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

Key = TypeVar("Key")
Model: TypeAlias = "Encoder | str | Path | SentenceTransformer"

FILE = "dense.safetensors"

PROBE = (
    "Which river runs through the old town?",
    "In 1871 the lighthouse keeper's daughter sold 3 boats, a bell & some letters (unsigned).",
    "def area(r): return 3.14159 * r ** 2",
)
"""Texts whose vectors are kept with an index, and made again when it is opened."""

_NEAR = 0.05
"""How far a probe's vector may move, of its length. Half precision and other devices move it by
about 0.01; another model, pooling, prompt or fine-tuning moves it by more."""

_PARAGRAPH = re.compile(r"\n\s*\n")


class DenseRetriever:
    """Passages whose vectors lie nearest to the query's; every vector is compared.

    The score is the cosine, or the dot product for a model made for it. Where the encoder reads
    less than a whole passage, the passage is embedded in parts and its best part counts. A query of
    several paragraphs asks with the mean of their vectors, and a paragraph that is longer than the
    encoder reads counts as the mean of its parts. Blank passages are never found.

    Args:
        passages: the corpus.
        model: an `Encoder`, or what `SentenceEncoder` takes.
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
        self, passages: Sequence[Passage], model: Model, *, progress: Progress | None = None
    ) -> None:
        self._fill(passages, encoder_of(model), {}, progress)

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
        starts = np.searchsorted(self._owners, np.arange(1, len(self.passages)))
        known = dict(zip(map(_key, self.passages), np.split(self._vectors, starts), strict=True))
        made = type(self).__new__(type(self))
        made._fill(passages, self.encoder, known, progress)
        return made

    def _fill(
        self,
        passages: Sequence[Passage],
        encoder: Encoder,
        known: Mapping[tuple[str, str], Vectors],
        progress: Progress | None,
    ) -> None:
        """Embed each (title, text) whose vectors, a row a part, are not known."""
        new = {
            key: encoder.passage_parts(one.text, one.title)
            for one in passages
            if (key := _key(one)) not in known and one.text.strip()
        }

        def show(done: int, total: int) -> None:
            if progress is not None:
                progress(done * len(new) // total, len(new))

        rows = {**known, **_embed(encoder, new, query=False, progress=show)}
        nothing = np.zeros((0, encoder.dimension), dtype=np.float32)
        mine = [rows.get(_key(one), nothing) for one in passages]
        self._vectors = np.concatenate([nothing, *mine]).astype(np.float32, copy=False)
        self._owners = np.repeat(np.arange(len(mine)), [len(each) for each in mine])
        self.passages, self.encoder, self.embedded = tuple(passages), encoder, len(new)
        if not len(self._vectors):
            raise RetrievalError("There is no text to search; load some documents first.")

    def retrieve(self, query: str, k: int = DEFAULT_K) -> list[ScoredPassage]:
        """Rank the passages by their nearness to the query; see `Retriever.retrieve`."""
        check_k(k)
        paragraphs = [one for one in _PARAGRAPH.split(query) if one.strip()]
        if not paragraphs:
            return []
        # A conversation's question comes several times and is embedded once.
        parts = {one: self.encoder.query_parts(one) for one in paragraphs}
        vectors = _embed(self.encoder, parts, query=True)
        asked = np.mean([vectors[one].mean(axis=0) for one in paragraphs], axis=0)
        scores = np.full(len(self.passages), -np.inf, dtype=np.float32)
        np.maximum.at(scores, self._owners, self._vectors @ asked)
        return best(self.passages, scores, k)

    def save(self, folder: str | Path) -> None:
        """Write passages and vectors into a folder, in place of an index that is there.

        Raises:
            InputError: a passage's metadata can't be written as JSON.
            RetrievalError: the folder can't be written.
        """
        encoder = self.encoder
        settings = {"model": encoder.name, "revision": encoder.revision}
        arrays = {
            "vectors": self._vectors,
            "owners": self._owners,
            "probe": encoder.embed(PROBE, query=False),
        }
        index_file.write(Path(folder) / FILE, self.passages, settings, arrays)

    @classmethod
    def load(cls, folder: str | Path, model: Model) -> DenseRetriever:
        """Read what `save` wrote; nothing but a few probe texts is embedded.

        Args:
            folder: given to `save`.
            model: the one that the vectors were made with, wherever it lies now.

        Raises:
            RetrievalError: there is no dense index, it is damaged, or it holds the vectors of
                another model or revision.
            InputError, ModelLoadError, MissingExtraError: see `SentenceEncoder`.
        """
        encoder, path = encoder_of(model), Path(folder) / FILE
        loaded = cls.__new__(cls)
        loaded.passages, settings, arrays = index_file.read(path, "vectors", "owners", "probe")
        loaded.encoder, loaded.embedded = encoder, 0
        loaded._vectors, loaded._owners = arrays["vectors"], arrays["owners"]
        # A name is not compared: the same model may lie in another folder now.
        probe, revision = arrays["probe"], settings["revision"]
        same = probe.shape[1] == encoder.dimension
        same = same and (revision == encoder.revision or None in (revision, encoder.revision))
        if same:
            moved = np.linalg.norm(encoder.embed(PROBE, query=False) - probe, axis=1)
            same = bool((moved <= _NEAR * np.linalg.norm(probe, axis=1)).all())
        if not same:
            raise RetrievalError(
                f"The vectors in {path} were made by {settings['model']!r}, revision {revision}, "
                f"and {encoder.name!r}, revision {encoder.revision}, makes others. Load that "
                "model, or delete the folder and embed the passages anew."
            )
        return loaded


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


def _key(passage: Passage) -> tuple[str, str]:
    """Equal for passages whose vectors are equal."""
    return passage.title or "", passage.text


def _embed(
    encoder: Encoder,
    parts: Mapping[Key, Sequence[str]],
    *,
    query: bool,
    progress: Progress | None = None,
) -> dict[Key, Vectors]:
    """The vectors of each key's parts, a row a part."""
    texts = [text for each in parts.values() for text in each]
    if not texts:
        return {}
    vectors = encoder.embed(texts, query=query, progress=progress)
    borders = np.cumsum([len(each) for each in parts.values()])
    return dict(zip(parts, np.split(vectors, borders[:-1]), strict=True))
