"""Models of sentence-transformers: texts into vectors, and how much they read at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from rag_windows.errors import InputError, MissingExtraError, ModelLoadError, missing
from rag_windows_retrievers.splitting import fitting

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

Vectors: TypeAlias = NDArray[np.float32]
Progress: TypeAlias = Callable[[int, int], None]
"""Called with what is done and the total, in passages; from 0 to the total, never backwards."""

_BATCHES = 16
"""How many batches are embedded between two calls of a progress."""


@runtime_checkable
class Encoder(Protocol):
    """What `DenseRetriever` asks of a model; `SentenceEncoder` is ours.

    Attributes:
        name: of the model, for messages.
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


class SentenceModel:
    """A model of one of sentence-transformers' classes, which threads use one at a time."""

    def __init__(self, kind: str, model: Any, revision: str | None, device: str | None) -> None:
        # The tokenizer's padding and truncation are states.
        self.lock = threading.Lock()
        self.model = model
        if not isinstance(model, str | Path):
            return
        try:
            import sentence_transformers  # on first use: it takes seconds

            self.model = getattr(sentence_transformers, kind)(
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

    @property
    def limit(self) -> int | None:
        """Tokens that it reads at once, special ones included; None for any number."""
        longest = self.model.max_seq_length
        return int(longest) if longest and longest < 10**9 else None

    def length(self, *texts: str) -> int:
        """Tokens of a text, or a pair of texts, special ones included."""
        with self.lock:
            # verbose=False: the length is what we want to know, not an oversight.
            encoded = self.model.tokenizer(*texts, truncation=False, verbose=False)
        return len(encoded["input_ids"])

    def parts(self, text: str, limit: int | None, header: str = "") -> list[str]:
        """A text whole where it fits under a limit in tokens, else all of it in parts.

        The header stands above each part, unless that leaves little room.
        """
        if limit is None or self.length(header + text) <= limit:
            return [header + text]
        if header and self.length(header) > limit * 7 // 8:
            text, header = header + text, ""
        spans = fitting(text, lambda part: self.length(header + part), limit)
        return [header + text[start:end] for start, end in spans] or [header]


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
        self._batch_size = batch_size
        self._reader = SentenceModel("SentenceTransformer", model, revision, device)
        self._model = self._reader.model
        config = getattr(self._model[0], "config", None)
        given = str(model) if isinstance(model, str | Path) else ""
        self.name = given or getattr(config, "_name_or_path", "") or "a model without a name"
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
        return self._parts("document", text, f"{title}\n" if title else "")

    def query_parts(self, query: str) -> list[str]:
        """Texts that the model reads whole."""
        return self._parts("query", query)

    def count(self, text: str) -> int:
        """Length of a text in the model's tokens, as `split_documents` asks for."""
        return self._reader.length(text) - self._reader.length("")

    def embed(
        self, texts: Sequence[str], *, query: bool, progress: Progress | None = None
    ) -> Vectors:
        """Vectors of texts; see `Encoder.embed`."""
        vectors = np.empty((len(texts), self.dimension), dtype=np.float32)
        encode = self._model.encode_query if query else self._model.encode_document
        for start in range(0, len(texts), step := self._batch_size * _BATCHES):
            some = list(texts[start : start + step])
            with self._reader.lock:
                vectors[start : start + step] = encode(
                    some,
                    batch_size=self._batch_size,
                    normalize_embeddings=self._normalize,
                    show_progress_bar=False,
                )
            if progress is not None:
                progress(start + len(some), len(texts))
        return vectors

    def _parts(self, prompt: str, text: str, header: str = "") -> list[str]:
        limit = self._reader.limit
        if limit is not None:
            limit -= self.count((self._model.prompts or {}).get(prompt) or "")
        return self._reader.parts(text, limit, header)


@contextmanager
def progress_bar(label: str) -> Iterator[Progress]:
    """A bar on standard error, shown only where that is a terminal.

    Args:
        label: stands before the bar.

    Raises:
        MissingExtraError: `tqdm` is not installed.
    """
    try:
        from tqdm import tqdm
    except ModuleNotFoundError as error:
        raise MissingExtraError(missing("A progress bar", "tqdm", "retrievers")) from error
    with tqdm(desc=label, unit=" passages", disable=None) as bar:

        def show(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield show
