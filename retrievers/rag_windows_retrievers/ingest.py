"""From files to an index on disk that follows them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from rag_windows import Passage
from rag_windows_retrievers.bm25 import BM25Retriever
from rag_windows_retrievers.dense import FILE, DenseRetriever, Model, encoder_of
from rag_windows_retrievers.documents import Skipped, load_documents
from rag_windows_retrievers.encoder import Progress
from rag_windows_retrievers.retriever import HybridRetriever, Retriever
from rag_windows_retrievers.splitting import DEFAULT_WORDS, TokenBudget, split_documents


@dataclass(frozen=True, slots=True)
class Index:
    """What `ingest` made and `open_index` opens.

    Attributes:
        bm25: ranks by words.
        dense: ranks by meaning; None without an embedding model.
        skipped: what was left out of the files, and why.
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
    paths: Iterable[str | Path],
    folder: str | Path,
    model: Model | None = None,
    *,
    words: int = DEFAULT_WORDS,
    tokens: TokenBudget | None = None,
    root: Path | None = None,
    progress: Progress | None = None,
) -> Index:
    """Read documents, split them, and keep an index of them in a folder.

    Called again, it embeds only passages whose text or title is new; those that are gone from the
    files go from the index. Passages have the same ids whenever the same files are read, see
    `split_document`. BM25's statistics are those of the whole corpus and are counted anew, which
    takes a fraction of the embedding.

    Args:
        paths: see `load_documents`.
        folder: of the index; made where it is missing.
        model: embeds passages, see `DenseRetriever`; None for BM25 alone.
        words: see `split_document`.
        tokens: see `split_document`.
        root: folder that ids are relative to; None is the working directory.
        progress: told how many passages are embedded; `progress_bar` makes one.

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
        encoder = encoder_of(model)
        if (Path(folder) / FILE).exists():
            dense = DenseRetriever.load(folder, encoder).updated(passages, progress=progress)
        else:
            dense = DenseRetriever(passages, encoder, progress=progress)
        dense.save(folder)
    bm25.save(folder)
    return Index(bm25, dense, loaded.skipped)


def open_index(folder: str | Path, model: Model | None = None) -> Index:
    """Open what `ingest` keeps in a folder.

    Args:
        folder: given to `ingest`.
        model: the one given to `ingest`; None for BM25 alone.

    Raises:
        RetrievalError: there is no such index, or it holds another model's vectors.
        ModelLoadError, MissingExtraError: see `SentenceEncoder`.
    """
    dense = None if model is None else DenseRetriever.load(folder, model)
    return Index(BM25Retriever.load(folder), dense)
