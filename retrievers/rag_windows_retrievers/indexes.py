"""Indexes over passages: by words, by meaning, and both in a folder that follows the files.

An index is one safetensors file, which is replaced as a whole: whoever reads meanwhile, and whoever
starts after a crash, finds the old one or the new one.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import os
import tempfile
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from rag_windows import Passage, with_neighbours
from rag_windows.errors import InputError, RetrievalError
from rag_windows_retrievers.documents import Skipped, load_documents
from rag_windows_retrievers.retriever import (
    BLANK_LINE,
    DEFAULT_K,
    HybridRetriever,
    Retriever,
    ScoredPassage,
    best,
    check_k,
    ranked_text,
    sentence_model,
)
from rag_windows_retrievers.splitting import DEFAULT_WORDS, TokenBudget, split_documents
from rag_windows_retrievers.words import FUNCTION_WORDS, tokenize

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

Vectors: TypeAlias = NDArray[np.float32]
Progress: TypeAlias = Callable[[int, int], None]
"""Called with what is done and the total, in texts; from 0 to the total, never backwards."""

_TOGETHER = 512
"""How many texts are embedded between two calls of a progress."""

Model: TypeAlias = "Encoder | str | Path | SentenceTransformer"
BM25_FILE, DENSE_FILE = "bm25.safetensors", "dense.safetensors"
_FORMAT = 2
_log = logging.getLogger(__name__)

PROBE = (
    "Which river runs through the old town?",
    "In 1871 the lighthouse keeper's daughter sold 3 boats, a bell & some letters (unsigned).",
    "def area(r): return 3.14159 * r ** 2",
)
"""Texts whose vectors are stored with a dense index, and made again when it is opened."""

_NEAR = 0.05
"""How far a probe's vector may move, of its length. Half precision and other devices move it by
about 0.01; another model, pooling, prompt or fine-tuning moves it by more."""


def _write(
    path: Path, passages: Sequence[Passage], settings: dict[str, Any], arrays: dict[str, Any]
) -> None:
    """Replace the index by passages without their scores, settings (JSON) and arrays."""
    from safetensors.numpy import save

    places = {passage.text: place for place, passage in enumerate(passages)}
    try:
        rows = [json.dumps(_row(passage, places)) for passage in passages]
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(
            f"A passage's metadata can't be saved as JSON ({error}). Keep strings, numbers, lists "
            "and objects in it."
        ) from error
    lines = "\n".join(rows).encode("ascii")
    arrays = {**arrays, "passages": np.frombuffer(lines, dtype=np.uint8)}
    head = json.dumps({"format": _FORMAT, "settings": settings})
    data = save(arrays, {"index": head, "sha256": _digest(head, arrays)})
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as folder:
            fresh = Path(folder) / path.name
            with fresh.open("xb") as stream:
                stream.write(data)
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(fresh, path)
    except OSError as error:
        raise RetrievalError(
            f"The index {path} can't be written: {error.strerror}. Check the folder, "
            "its permissions and the free space."
        ) from error


def _row(passage: Passage, places: Mapping[str, int]) -> dict[str, Any]:
    """A passage as JSON; a text in front of it that is a passage's, by that one's place."""
    row = {"text": passage.text, "id": passage.id, "title": passage.title}
    chunk: dict[str, Any] = {"document": passage.document, "index": passage.index}
    if before := [places.get(text, text) for text in passage.before]:
        chunk["before"] = before
    known = {name: value for name, value in chunk.items() if value is not None}
    return {**row, "metadata": dict(passage.metadata), **known}


def _passages(rows: Sequence[Mapping[str, Any]]) -> tuple[Passage, ...]:
    """What `_row` made of passages, as these."""
    texts = [row["text"] for row in rows]
    before = [
        [texts[one] if isinstance(one, int) else one for one in row.get("before", ())]
        for row in rows
    ]
    return tuple(Passage(**{**row, "before": b}) for row, b in zip(rows, before, strict=True))


def _read(path: Path) -> tuple[tuple[Passage, ...], dict[str, Any], dict[str, Any]]:
    """Check the index and read it: passages, settings and arrays."""
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        # Read, not mapped: a mapped file that someone truncates ends the process.
        data = path.read_bytes()
    except OSError as error:
        raise RetrievalError(
            f"{path.parent} holds no index that can be read ({error.strerror}). Save one there "
            "first."
        ) from error
    try:
        arrays = load(data)
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
        head = json.loads(header["index"])
        if head["format"] != _FORMAT:
            raise RetrievalError(
                f"The index {path} was written by another version. Build it again."
            )
        if header["sha256"] != _digest(header["index"], arrays):
            raise ValueError("its checksum is wrong")
        rows = arrays.pop("passages").tobytes().decode("ascii").splitlines()
        return _passages([json.loads(row) for row in rows]), head["settings"], arrays
    except (ValueError, KeyError, TypeError, SafetensorError) as error:
        raise RetrievalError(
            f"The index {path} is damaged ({error}). Delete it and build it again."
        ) from error


def _digest(head: str, arrays: dict[str, Any]) -> str:
    digest = hashlib.sha256(head.encode())
    for name, array in sorted(arrays.items()):
        digest.update(f"{name} {array.dtype} {array.shape}".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


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

    def count(self, text: str) -> int:
        """Length of a text in the model's tokens, for a `TokenBudget`."""
        return len(self._ids([text])[0]) - len(self._ids([""])[0])

    def embed(
        self, texts: Sequence[str], *, query: bool, progress: Progress | None = None
    ) -> Vectors:
        """Vectors of texts; see `Encoder.embed`."""
        longest = self._model.max_seq_length
        cut = 0 if query or not longest else sum(len(ids) > longest for ids in self._ids(texts))
        if cut:
            _log.warning(
                "%d of %d texts are longer than the %d tokens that %s reads, so their ends can't "
                "be found by meaning. Split them into shorter passages, for example with a "
                "TokenBudget.",
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
        self.passages, self.encoder = tuple(with_neighbours(passages)), _encoder(model)
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

    def save(self, folder: str | Path) -> None:
        """Write passages and vectors into a folder, in place of an index that is there.

        Raises:
            InputError: a passage's metadata can't be written as JSON.
            RetrievalError: the folder can't be written.
        """
        probe = self.encoder.embed(PROBE, query=False)
        arrays = {"vectors": self._vectors, "probe": probe}
        _write(Path(folder) / DENSE_FILE, self.passages, {"model": self.encoder.name}, arrays)

    @classmethod
    def load(cls, folder: str | Path, model: Model) -> DenseRetriever:
        """Read what `save` wrote; nothing but a few probe texts is embedded.

        The model must be the one that the vectors were made with, wherever it lies now.

        Raises:
            RetrievalError: there is no dense index, it is damaged, or it holds the vectors of
                another model.
            InputError, ModelLoadError, MissingExtraError: see `SentenceEncoder`.
        """
        path, encoder = Path(folder) / DENSE_FILE, _encoder(model)
        loaded = cls.__new__(cls)
        loaded.passages, settings, arrays = _read(path)
        loaded.encoder, probe, loaded._vectors = encoder, arrays["probe"], arrays["vectors"]
        loaded._searched = _with_text(loaded.passages)
        if len(loaded._vectors) != len(loaded._searched):
            raise RetrievalError(
                f"The index {path} was written by another version. Build it again."
            )
        # A name is not compared: the same model may lie in another folder now.
        if same := probe.shape[1] == encoder.dimension:
            moved = np.linalg.norm(encoder.embed(PROBE, query=False) - probe, axis=1)
            same = bool((moved <= _NEAR * np.linalg.norm(probe, axis=1)).all())
        if not same:
            raise RetrievalError(
                f"The vectors in {path} were made by {settings['model']!r}, not by "
                f"{encoder.name!r}. Load that model, or delete the folder and embed the passages "
                "again."
            )
        return loaded


def _with_text(passages: Iterable[Passage]) -> list[Passage]:
    return [one for one in passages if one.text.strip()]


def _encoder(model: Model) -> Encoder:
    return model if isinstance(model, Encoder) else SentenceEncoder(model)


@dataclass(frozen=True, slots=True)
class Index:
    """An index that `ingest` makes and `open_index` opens; without an embedding model, only BM25.

    `skipped` says what `ingest` left out of the files, and why.
    """

    bm25: BM25Retriever
    dense: DenseRetriever | None = None
    skipped: tuple[Skipped, ...] = ()

    @property
    def passages(self) -> tuple[Passage, ...]:
        """All passages."""
        return self.bm25.passages

    @property
    def retriever(self) -> Retriever:
        """Both rankings fused, or the only one."""
        return self.bm25 if self.dense is None else HybridRetriever([self.bm25, self.dense])


def ingest(
    paths: str | Path | Iterable[str | Path],
    folder: str | Path,
    model: Model | None = None,
    *,
    words: int = DEFAULT_WORDS,
    tokens: TokenBudget | None = None,
    root: Path | None = None,
    progress: Progress | None = None,
) -> Index:
    """Read documents, split them, and store an index of them in a folder.

    Called again, it embeds only passages whose text or title is new; those that are gone from the
    files go from the index.

    Args:
        paths: see `load_documents`.
        folder: of the index; made where it is missing.
        model: embeds passages, see `DenseRetriever`; None for BM25 only.
        words: see `split_document`.
        tokens: see `split_document`.
        root: see `load_documents`.
        progress: called with the number of passages embedded and of all; see `progress_bar`.

    Raises:
        DocumentError: see `load_documents`.
        RetrievalError: the folder can't be read or written, or holds another model's vectors.
        InputError: metadata can't be saved.
        ModelLoadError, MissingExtraError: see `SentenceEncoder`.
    """
    loaded = load_documents(paths, root=root)
    passages = split_documents(loaded.documents, words=words, tokens=tokens)
    bm25 = BM25Retriever(passages)
    dense = None
    if model is not None:
        exists = (Path(folder) / DENSE_FILE).exists()
        known = DenseRetriever.load(folder, model) if exists else None
        encoder = model if known is None else known.encoder
        dense = DenseRetriever(passages, encoder, known=known, progress=progress)
        dense.save(folder)
    _write(Path(folder) / BM25_FILE, passages, {}, {})
    return Index(bm25, dense, loaded.skipped)


def open_index(folder: str | Path, model: Model | None = None) -> Index:
    """Open what `ingest` stored in a folder, with the model it was given; None for BM25 only.

    Raises:
        RetrievalError: there is no such index, or it holds another model's vectors.
        ModelLoadError, MissingExtraError: see `SentenceEncoder`.
    """
    dense = None if model is None else DenseRetriever.load(folder, model)
    passages, _, _ = _read(Path(folder) / BM25_FILE)
    return Index(BM25Retriever(passages), dense)
