"""Models of sentence-transformers: texts into vectors, and a ranking read again."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from rag_windows import Passage
from rag_windows.errors import InputError, MissingExtraError, ModelLoadError, missing
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

_log = logging.getLogger(__name__)
_TOGETHER = 512
"""How many texts are embedded between two calls of a progress."""


@runtime_checkable
class Encoder(Protocol):
    """What `DenseRetriever` asks of a model; `SentenceEncoder` is ours.

    Attributes:
        name: of the model, for messages.
        dimension: of its vectors.
    """

    name: str
    dimension: int

    def embed(
        self, texts: Sequence[str], *, query: bool, progress: Progress | None = None
    ) -> Vectors:
        """Texts -> (len(texts), dimension), float32; the dot product says how near two are."""
        ...


def _loaded(kind: str, model: Any, revision: str | None, device: str | None) -> Any:
    """A model of one of sentence-transformers' classes, loaded where it is a name or a folder."""
    if not isinstance(model, str | Path):
        return model
    try:
        import sentence_transformers  # on first use: it takes seconds

        return getattr(sentence_transformers, kind)(
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
        self._model = _loaded("SentenceTransformer", model, revision, device)
        # The tokenizer's padding and truncation are states.
        self._lock = threading.Lock()
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

    def count(self, text: str) -> int:
        """Length of a text in the model's tokens, as `split_documents` asks for."""
        return len(self._ids([text])[0]) - len(self._ids([""])[0])

    def embed(
        self, texts: Sequence[str], *, query: bool, progress: Progress | None = None
    ) -> Vectors:
        """Vectors of texts; see `Encoder.embed`."""
        longest = self._model.max_seq_length
        cut = 0 if query or not longest else sum(len(ids) > longest for ids in self._ids(texts))
        if cut:
            _log.warning(
                "%d of %d texts are longer than the %d tokens that %s reads, and their ends are "
                "not found by meaning; split them shorter, for example with a TokenBudget.",
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


class Reranker:
    """Orders what another retriever found by a cross-encoder's scores.

    Where query and passage together are longer than the model reads, the end of the longer one is
    left out. Weights come from safetensors files only; no code of a repository is run. Threads may
    share it.

    Args:
        retriever: finds the candidates.
        model: a local folder, a name on the Hub, or a loaded `CrossEncoder` with one output.
        candidates: how many to ask for, where `k` is not more.
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
        revision: str | None = None,
        device: str | None = None,
    ) -> None:
        check_k(candidates)
        self.retriever, self.candidates = retriever, candidates
        self._model, self._lock = _loaded("CrossEncoder", model, revision, device), threading.Lock()
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
        """The best `k` of any passages, or all, with the model's scores; equal ones in order."""
        if not passages:
            return []
        pairs = [(query, ranked_text(one)) for one in passages]
        with self._lock:
            scores = self._model.predict(pairs, show_progress_bar=False, convert_to_numpy=True)
        return best(passages, scores, k)


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
