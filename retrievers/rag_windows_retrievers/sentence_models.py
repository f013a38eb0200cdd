"""Models of sentence-transformers: texts into vectors, and a ranking read again.

Nothing is cut at a model's limit: what is longer is read in parts.
"""

from __future__ import annotations

import statistics
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from rag_windows import Passage
from rag_windows.errors import InputError, MissingExtraError, ModelLoadError, missing
from rag_windows_retrievers.documents import fitting
from rag_windows_retrievers.retriever import (
    DEFAULT_K,
    Retriever,
    ScoredPassage,
    best,
    check_k,
    ranked_text,
)

if TYPE_CHECKING:
    from sentence_transformers import CrossEncoder, SentenceTransformer

Vectors: TypeAlias = NDArray[np.float32]
Progress: TypeAlias = Callable[[int, int], None]
"""Called with what is done and the total, in texts; from 0 to the total, never backwards."""

_BATCHES = 16
"""How many batches are embedded between two calls of a progress."""


@runtime_checkable
class Encoder(Protocol):
    """What `DenseRetriever` asks of a model; `SentenceEncoder` is ours.

    Attributes:
        name: of the model, for messages.
        dimension: of its vectors.
    """

    name: str
    dimension: int

    def passage_parts(self, text: str, title: str | None) -> list[str]:
        """A passage as the texts to embed: one, or several where it is longer than the model."""
        ...

    def query_parts(self, query: str) -> list[str]:
        """A query likewise."""
        ...

    def embed(
        self, texts: Sequence[str], *, query: bool, progress: Progress | None = None
    ) -> Vectors:
        """Texts -> (len(texts), dimension), float32; the dot product says how near two are."""
        ...


class _SentenceModel:
    """A model of one of sentence-transformers' classes, which threads use one at a time."""

    def __init__(
        self, kind: str, model: Any, revision: str | None, device: str | None, batch_size: int
    ) -> None:
        if batch_size < 1:
            raise InputError(f"batch_size must be at least 1, not {batch_size}.")
        # The tokenizer's padding and truncation are states.
        self._lock, self._batch_size = threading.Lock(), batch_size
        self._model = model
        if not isinstance(model, str | Path):
            return
        try:
            import sentence_transformers  # on first use: it takes seconds

            self._model = getattr(sentence_transformers, kind)(
                str(model),
                revision=revision,
                device=device,
                trust_remote_code=False,
                model_kwargs={"use_safetensors": True},
            )
        except ModuleNotFoundError as error:
            told = missing("A dense retriever or re-ranker", "sentence-transformers", "retrievers")
            raise MissingExtraError(told) from error
        except (OSError, ValueError, KeyError, ImportError, RuntimeError, TypeError) as error:
            first = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ModelLoadError(
                f"The model {str(model)!r} can't be loaded: {first} Check the name and the network,"
                " or give the folder of a sentence-transformers model with safetensors weights."
            ) from error

    def _longest(self) -> int | None:
        """Tokens that it reads at once, special ones included; None for any number."""
        longest = self._model.max_seq_length
        return int(longest) if longest and longest < 10**9 else None

    def _length(self, *texts: str) -> int:
        """Tokens of a text, or a pair of texts, special ones included."""
        with self._lock:
            # verbose=False: the length is what we want to know, not an oversight.
            encoded = self._model.tokenizer(*texts, truncation=False, verbose=False)
        return len(encoded["input_ids"])

    def _parts(self, text: str, limit: int | None, header: str = "") -> list[str]:
        """A text whole where it fits under a limit in tokens, else all of it in parts.

        The header stands above each part, unless that leaves little room.
        """
        if limit is None or self._length(header + text) <= limit:
            return [header + text]
        if header and self._length(header) > limit * 7 // 8:
            text, header = header + text, ""
        spans = fitting(text, lambda part: self._length(header + part), limit)
        return [header + text[start:end] for start, end in spans] or [header]


class SentenceEncoder(_SentenceModel):
    """A `sentence-transformers` model; threads may share it.

    Weights come from safetensors files only, and no code of a repository is run. Prompts that the
    model defines for queries and documents are used. Vectors are normalised unless the model was
    made for dot products.

    Args:
        model: a local folder, a name on the Hub, or a loaded `SentenceTransformer`.
        revision: of the model on the Hub; None for its main one.
        device: "cpu", "cuda", ...; None for the best there is.
        batch_size: texts in one pass.

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
        batch_size: int = 32,
    ) -> None:
        super().__init__("SentenceTransformer", model, revision, device, batch_size)
        config = getattr(self._model[0], "config", None)
        given = str(model) if isinstance(model, str | Path) else ""
        self.name = given or getattr(config, "_name_or_path", "") or "a model without a name"
        self.dimension = int(self._model.get_embedding_dimension() or 0)
        similarity = str(self._model.similarity_fn_name or "cosine")
        if similarity not in ("cosine", "dot"):
            raise InputError(
                f"The model {self.name!r} compares its vectors by {similarity}; "
                "choose one that does so by cosine or dot product."
            )
        self._normalize = similarity == "cosine"

    def passage_parts(self, text: str, title: str | None) -> list[str]:
        """Texts that the model reads whole; the title stands above each."""
        return self._parts(text, self._room("document"), f"{title}\n" if title else "")

    def query_parts(self, query: str) -> list[str]:
        """Texts that the model reads whole."""
        return self._parts(query, self._room("query"))

    def count(self, text: str) -> int:
        """Length of a text in the model's tokens, as `split_documents` asks for."""
        return self._length(text) - self._length("")

    def embed(
        self, texts: Sequence[str], *, query: bool, progress: Progress | None = None
    ) -> Vectors:
        """Vectors of texts; see `Encoder.embed`."""
        vectors = np.empty((len(texts), self.dimension), dtype=np.float32)
        encode = self._model.encode_query if query else self._model.encode_document
        for start in range(0, len(texts), step := self._batch_size * _BATCHES):
            some = list(texts[start : start + step])
            with self._lock:
                vectors[start : start + step] = encode(
                    some,
                    batch_size=self._batch_size,
                    normalize_embeddings=self._normalize,
                    show_progress_bar=False,
                )
            if progress is not None:
                progress(start + len(some), len(texts))
        return vectors

    def _room(self, prompt: str) -> int | None:
        """Tokens beside the model's own prompt of this name."""
        longest = self._longest()
        taken = self.count((self._model.prompts or {}).get(prompt) or "")
        return None if longest is None else longest - taken


class Reranker(_SentenceModel):
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
        super().__init__("CrossEncoder", model, revision, device, batch_size)
        check_k(candidates)
        self.retriever, self.candidates = retriever, candidates
        if self._model.num_labels != 1:
            raise InputError(
                f"This cross-encoder has {self._model.num_labels} outputs; choose one for ranking, "
                "which has one."
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
        room = longest = self._longest()
        asked = [query]
        if longest is not None:
            # Of a pair, each text counted with a lone text's special tokens.
            limit = longest + 2 * self._length("a") - self._length("a", "a")
            asked = self._parts(query, limit // 2)
            room = limit - max(map(self._length, asked))
        read = [self._parts(ranked_text(one), room) for one in passages]
        pairs = [(part, text) for texts in read for part in asked for text in texts]
        with self._lock:
            found = self._model.predict(
                pairs, batch_size=self._batch_size, show_progress_bar=False, convert_to_numpy=True
            )
        scores = iter(found.tolist())
        means = [
            statistics.fmean(max(next(scores) for _ in texts) for _ in asked) for texts in read
        ]
        return best(passages, means, k)


@contextmanager
def progress_bar(label: str) -> Iterator[Progress]:
    """A bar on standard error, shown only where that is a terminal.

    Args:
        label: stands before the bar.
    """
    from tqdm import tqdm

    with tqdm(desc=label, unit=" texts", disable=None) as bar:

        def show(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield show
