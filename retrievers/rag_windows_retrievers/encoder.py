"""Texts into vectors, by a model of sentence-transformers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

from rag_windows.errors import InputError, MissingExtraError, ModelLoadError
from rag_windows.forks import Lock
from rag_windows.hints import missing
from rag_windows_retrievers.parts import fitting_parts
from rag_windows_retrievers.progress import Progress

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from sentence_transformers import SentenceTransformer

    Vectors: TypeAlias = NDArray[np.float32]


@runtime_checkable
class Encoder(Protocol):
    """What `DenseRetriever` asks of a model; `SentenceEncoder` is ours.

    Attributes:
        name: of the model, for messages and manifests.
        revision: of the model, or None where it has none.
        dimension: of its vectors.
    """

    name: str
    revision: str | None
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


class SentenceEncoder:
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
        if batch_size < 1:
            raise InputError(f"batch_size must be at least 1, not {batch_size}.")
        # The tokenizer's padding and truncation are states: one thread at a time may set them.
        self._lock = Lock()
        self._batch_size = batch_size
        self._model = load(model, revision, device) if isinstance(model, str | Path) else model
        config = getattr(self._model[0], "config", None)
        self.name = str(model if isinstance(model, str | Path) else _name(config))
        self.revision = revision or getattr(config, "_commit_hash", None)
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
        header = f"{title}\n" if title else ""
        return fitting_parts(text, header, self._encode, self._limit("document"))

    def query_parts(self, query: str) -> list[str]:
        """Texts that the model reads whole."""
        return fitting_parts(query, "", self._encode, self._limit("query"))

    def count(self, text: str) -> int:
        """Length of a text in the model's tokens, as `split_documents` asks for."""
        return len(self._encode(text)) - len(self._encode(""))

    def embed(
        self, texts: Sequence[str], *, query: bool, progress: Progress | None = None
    ) -> Vectors:
        """Vectors of texts, longest texts together; see `Encoder.embed`."""
        import numpy as np

        vectors = np.empty((len(texts), self.dimension), dtype=np.float32)
        encode = self._model.encode_query if query else self._model.encode_document
        order = sorted(range(len(texts)), key=lambda number: -len(texts[number]))
        for start in range(0, len(texts), self._batch_size):
            rows = order[start : start + self._batch_size]
            with self._lock:
                found = encode(
                    [texts[row] for row in rows],
                    batch_size=self._batch_size,
                    normalize_embeddings=self._normalize,
                    show_progress_bar=False,
                )
            vectors[rows] = np.asarray(found, dtype=np.float32)
            if progress is not None:
                progress(min(start + self._batch_size, len(texts)), len(texts))
        return vectors

    def _limit(self, prompt: str) -> int | None:
        longest = self._model.max_seq_length
        if longest is None or longest != longest or longest >= 10**9:
            return None
        return int(longest) - self.count((self._model.prompts or {}).get(prompt) or "")

    def _encode(self, text: str) -> Sequence[int]:
        with self._lock:
            # verbose=False: the length is what we want to know, not an oversight.
            return list(self._model.tokenizer(text, truncation=False, verbose=False)["input_ids"])


def load(model: str | Path, revision: str | None, device: str | None) -> SentenceTransformer:
    """Load a model by folder or name; see `SentenceEncoder`."""
    library = sentence_transformers()
    try:
        return library.SentenceTransformer(
            str(model),
            revision=revision,
            device=device,
            trust_remote_code=False,
            model_kwargs={"use_safetensors": True},
        )
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, TypeError) as error:
        raise ModelLoadError(cant_load(model, error)) from error


def sentence_transformers() -> Any:
    """The library, imported on first use: it takes seconds.

    Raises:
        MissingExtraError: it is not installed.
    """
    try:
        import sentence_transformers as library
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            missing("A dense retriever or re-ranker", "sentence-transformers", "retrievers")
        ) from error
    return library


def cant_load(model: str | Path, error: Exception) -> str:
    """What to tell when a model can't be loaded."""
    first = (str(error).strip() or type(error).__name__).splitlines()[0]
    return (
        f"The model {str(model)!r} can't be loaded: {first} Check the name and the network, or "
        "give the folder of a sentence-transformers model with safetensors weights."
    )


def _name(config: Any) -> str:
    return getattr(config, "_name_or_path", "") or "a model without a name"
