"""Passages of a list, found by words and by meaning, in memory."""

from __future__ import annotations

import itertools
import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeAlias, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from rag_windows import Passage, with_neighbours
from rag_windows.errors import InputError, RetrievalError
from rag_windows_retrievers.retriever import (
    BLANK_LINE,
    DEFAULT_K,
    ScoredPassage,
    best,
    check_k,
    ranked_text,
    sentence_model,
)
from rag_windows_retrievers.words import FUNCTION_WORDS, tokenize

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

Vectors: TypeAlias = NDArray[np.float32]
Progress: TypeAlias = Callable[[int, int], None]
"""Called with what is done and the total, in texts; from 0 to the total, never backwards."""

_TOGETHER = 512
"""How many texts are embedded between two calls of a progress."""

Model: TypeAlias = "Encoder | str | Path | SentenceTransformer"
_log = logging.getLogger(__name__)

PROBE = (
    "Which river runs through the old town?",
    "In 1871 the lighthouse keeper's daughter sold 3 boats, a bell & some letters (unsigned).",
    "def area(r): return 3.14159 * r ** 2",
)
"""Texts whose vectors are stored with an index, and made again when it is opened."""

_NEAR = 0.05
"""How far a probe's vector may move, of its length. Half precision and other devices move it by
about 0.01; another model, pooling, prompt or fine-tuning moves it by more."""


class BM25Retriever:
    """Okapi BM25 over the titles and texts of passages, computed by `bm25s`.

    The scoring is Lucene's variant (Kamphuis et al., "Which BM25 Do You Mean?", ECIR 2020), which
    is never negative. English function words in a question are ignored as long as another word of
    it is known. A word that stands in a question twice counts twice. Passages that share no word
    with it are not found.

    Args:
        passages: to be ranked; taken for a whole corpus, so that `rag_windows.with_neighbours`
            fills in what they lack.
        k1: how soon repeated words stop counting, at least 0.
        b: how much long passages are held back, 0 to 1.

    Raises:
        InputError: ``k1`` or ``b`` is out of range.
        RetrievalError: there are no passages, or none holds a word.
    """

    def __init__(self, passages: Sequence[Passage], *, k1: float = 1.5, b: float = 0.75) -> None:
        if not k1 >= 0 or not 0 <= b <= 1:
            raise InputError(
                f"BM25's k1 must be at least 0 and b from 0 to 1, not k1={k1} and b={b}."
            )
        self.passages = tuple(with_neighbours(passages))
        places: defaultdict[str, int] = defaultdict(itertools.count().__next__)
        words = [[places[word] for word in tokenize(ranked_text(one))] for one in self.passages]
        if not places:
            raise RetrievalError("No passage holds a word. Check the contents of the documents.")
        import bm25s  # on first use: importing the engine needs none of it

        self._index = bm25s.BM25(k1=k1, b=b, method="lucene", backend="numpy")
        self._index.index((words, dict(places)), show_progress=False)

    def retrieve(self, query: str, k: int = DEFAULT_K) -> list[ScoredPassage]:
        """Rank the passages that share a word with the query; see `Retriever.retrieve`."""
        check_k(k)
        known = [word for word in tokenize(query) if word in self._index.vocab_dict]
        telling = [word for word in known if word not in FUNCTION_WORDS]
        if not known:
            return []
        return best(self.passages, self._index.get_scores(telling or known), k, above=0.0)


@runtime_checkable
class Encoder(Protocol):
    """What `DenseRetriever` asks of a model; its name is for messages."""

    name: str
    dimension: int

    def embed(
        self, texts: Sequence[str], *, query: bool, progress: Progress | None = None
    ) -> Vectors:
        """Texts -> (len(texts), dimension), float32; the dot product says how near two are."""
        ...


class SentenceEncoder:
    """A `sentence-transformers` model; threads may share it.

    Of a passage that is longer than the model reads, the end is left out, and a warning is logged.
    Weights come from safetensors files only, and no code of a repository is run. Prompts that the
    model defines for queries and documents are used. Vectors are normalised unless the model was
    made for dot products.

    Args:
        model: a local folder, a name on the Hub, or a loaded `SentenceTransformer`.
        revision: of the model on the Hub; None for its main one.
        device: "cpu", "cuda", ...; None for the best there is.

    Raises:
        ModelLoadError: the model is not found or can't be loaded.
        InputError: the model compares its vectors by something else than cosine or dot product.
        MissingExtraError: `sentence-transformers` is not installed.
    """

    def __init__(
        self,
        model: str | Path | SentenceTransformer,
        *,
        revision: str | None = None,
        device: str | None = None,
    ) -> None:
        self._model = sentence_model("SentenceTransformer", model, revision, device)
        # The tokenizer's padding and truncation are states.
        self._lock = threading.Lock()
        self.name = str(model) if isinstance(model, str | Path) else "a loaded model"
        self.dimension = int(self._model.get_embedding_dimension() or 0)
        similarity = str(self._model.similarity_fn_name or "cosine")
        if similarity not in ("cosine", "dot"):
            raise InputError(
                f"{self.name} compares by {similarity}. Choose an embedding model that "
                "compares by cosine or dot product."
            )
        self._normalize = similarity == "cosine"

    def embed(
        self, texts: Sequence[str], *, query: bool, progress: Progress | None = None
    ) -> Vectors:
        """Vectors of texts; see `Encoder.embed`."""
        longest = self._model.max_seq_length
        cut = 0 if query or not longest else sum(len(ids) > longest for ids in self._ids(texts))
        if cut:
            _log.warning(
                "%d of %d texts are longer than the %d tokens that %s reads, so their ends can't "
                "be found by meaning. Split documents into shorter passages: words=.",
                *(cut, len(texts), longest, self.name),
            )
        vectors = np.empty((len(texts), self.dimension), dtype=np.float32)
        encode = self._model.encode_query if query else self._model.encode_document
        for start in range(0, len(texts), _TOGETHER):
            some = list(texts[start : start + _TOGETHER])
            with self._lock:
                vectors[start : start + _TOGETHER] = encode(
                    some, normalize_embeddings=self._normalize, show_progress_bar=False
                )
            if progress is not None:
                progress(start + len(some), len(texts))
        return vectors

    def _ids(self, texts: Sequence[str]) -> list[list[int]]:
        with self._lock:
            # verbose=False: the length is what we want to know, not an oversight.
            encoded = self._model.tokenizer(list(texts), truncation=False, verbose=False)
        return list(encoded["input_ids"])


@contextmanager
def progress_bar(label: str) -> Iterator[Progress]:
    """A bar on standard error behind a label, shown only where that is a terminal."""
    from tqdm import tqdm

    with tqdm(desc=label, unit=" texts", disable=None) as bar:

        def show(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield show


class DenseRetriever:
    """Passages whose vectors lie nearest to the query's; every vector is compared.

    The score is the cosine, or the dot product for a model made for it. A query of several
    paragraphs asks with the mean of their vectors. Blank passages are never found.

    Args:
        passages: the corpus; `rag_windows.with_neighbours` fills in what they lack.
        model: an `Encoder`, or what `SentenceEncoder` takes.
        known: an older retriever with the same model: what it holds is not embedded again.
        progress: called with the number of texts embedded and of all texts.

    Raises:
        RetrievalError: no passage holds text.
        InputError, ModelLoadError, MissingExtraError: see `SentenceEncoder`.
    """

    def __init__(
        self,
        passages: Sequence[Passage],
        model: Model,
        *,
        known: DenseRetriever | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.passages, self.encoder = tuple(with_neighbours(passages)), encoder_of(model)
        self._searched = _with_text(self.passages)
        if not self._searched:
            raise RetrievalError("There is no text to search. Load some documents first.")
        rows: dict[str, Vectors] = {}
        if known is not None:
            rows.update(zip(map(ranked_text, known._searched), known._vectors, strict=True))
        texts = [ranked_text(one) for one in self._searched]
        if new := [text for text in dict.fromkeys(texts) if text not in rows]:
            vectors = self.encoder.embed(new, query=False, progress=progress)
            rows.update(zip(new, vectors, strict=True))
        self._vectors: Vectors = np.stack([rows[text] for text in texts], dtype=np.float32)

    def retrieve(self, query: str, k: int = DEFAULT_K) -> list[ScoredPassage]:
        """Rank the passages by their nearness to the query; see `Retriever.retrieve`."""
        check_k(k)
        paragraphs = [one for one in BLANK_LINE.split(query) if one.strip()]
        if not paragraphs:
            return []
        asked = self.encoder.embed(paragraphs, query=True).mean(axis=0)
        return best(self._searched, self._vectors @ asked, k)


def _with_text(passages: Iterable[Passage]) -> list[Passage]:
    return [one for one in passages if one.text.strip()]


def moved(probe: Vectors, stored: Vectors) -> bool:
    """Whether the vectors of `PROBE` are those of another model than the stored ones."""
    if probe.shape != stored.shape:
        return True
    distances = np.linalg.norm(probe - stored, axis=1)
    return bool((distances > _NEAR * np.linalg.norm(stored, axis=1)).any())


def encoder_of(model: Model) -> Encoder:
    """A model as an `Encoder`."""
    return model if isinstance(model, Encoder) else SentenceEncoder(model)
