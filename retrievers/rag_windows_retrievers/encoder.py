"""Models of sentence-transformers: texts into vectors, and how much they read at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

from rag_windows.errors import InputError, MissingExtraError, ModelLoadError, missing
from rag_windows.threads import Lock
from rag_windows_retrievers.splitting import fitting

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from sentence_transformers import SentenceTransformer

    Vectors: TypeAlias = NDArray[np.float32]

Progress: TypeAlias = Callable[[int, int], None]
"""Called with what is done and the total, in passages; from 0 to the total, never backwards."""


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
        name = str(model) if isinstance(model, str | Path) else ""
        self._model: Any = load_model("SentenceTransformer", model, revision, device)
        config = getattr(self._model[0], "config", None)
        self.name = name or getattr(config, "_name_or_path", "") or "a model without a name"
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
        return fitting_parts(text, header, self._length, self._limit("document"))

    def query_parts(self, query: str) -> list[str]:
        """Texts that the model reads whole."""
        return fitting_parts(query, "", self._length, self._limit("query"))

    def count(self, text: str) -> int:
        """Length of a text in the model's tokens, as `split_documents` asks for."""
        return self._length(text) - self._length("")

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
                progress(start + len(rows), len(texts))
        return vectors

    def _limit(self, prompt: str) -> int | None:
        longest = self._model.max_seq_length
        if longest is None or longest != longest or longest >= 10**9:
            return None
        return int(longest) - self.count((self._model.prompts or {}).get(prompt) or "")

    def _length(self, text: str) -> int:
        with self._lock:
            return count_tokens(self._model, text)


def fitting_parts(
    text: str, header: str, length: Callable[[str], int], limit: int | None
) -> list[str]:
    """Cut a text so that nothing of it is lost to a model's limit.

    Args:
        text: any text.
        header: repeated before each part, unless that leaves little room.
        length: of a text in tokens as the model gets them, special tokens included.
        limit: tokens that the model reads; None for a model without a limit.

    Returns:
        The whole text where it fits, else its parts in order; one at least.

    Raises:
        InputError: the model reads too few tokens for a single character.
    """
    if limit is None or length(header + text) <= limit:
        return [header + text]
    if header and length(header) > limit * 7 // 8:
        text, header = header + text, ""
    spans = fitting(text, lambda part: length(header + part), limit)
    return [header + text[start:end] for start, end in spans] or [header]


def load_model(kind: str, model: object, revision: str | None, device: str | None) -> Any:
    """Load a model by folder or name; one that is loaded is given back.

    Args:
        kind: "SentenceTransformer" or "CrossEncoder".
        model: a folder, a name on the Hub, or a loaded model.
        revision: of the model on the Hub.
        device: where it runs.

    Raises:
        ModelLoadError: it is not found, or can't be loaded.
        MissingExtraError: `sentence-transformers` is not installed.
    """
    if not isinstance(model, str | Path):
        return model
    try:
        import sentence_transformers as library  # on first use: it takes seconds
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            missing("A dense retriever or re-ranker", "sentence-transformers", "retrievers")
        ) from error
    try:
        return getattr(library, kind)(
            str(model),
            revision=revision,
            device=device,
            trust_remote_code=False,
            model_kwargs={"use_safetensors": True},
        )
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, TypeError) as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelLoadError(
            f"The model {str(model)!r} can't be loaded: {first} Check the name and the network, or "
            "give the folder of a sentence-transformers model with safetensors weights."
        ) from error


def count_tokens(model: Any, *texts: str) -> int:
    """Tokens of a text, or a pair of texts, with the special ones; the caller holds its lock."""
    # verbose=False: the length is what we want to know, not an oversight.
    return len(model.tokenizer(*texts, truncation=False, verbose=False)["input_ids"])


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
