"""From --docs to a retriever."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rag_windows.cli.progress import Progress
from rag_windows.sample_files import samples_path

if TYPE_CHECKING:
    from rag_windows_retrievers import BM25Retriever, Skipped


@dataclass(frozen=True, slots=True)
class Corpus:
    """Documents that can be searched, and what the user should know about them."""

    retriever: BM25Retriever
    notes: tuple[str, ...]


def open_corpus(docs: Sequence[str] | None, words: int, progress: Progress) -> Corpus:
    """Read documents, split them into passages and index these.

    Args:
        docs: files, folders and patterns; None for the shipped sample corpus.
        words: aimed-at length of a passage.
        progress: shows what goes on.

    Raises:
        DocumentError: nothing to read; see `rag_windows_retrievers.load_documents`.
        RetrievalError: no passage holds a word.
    """
    from rag_windows_retrievers import BM25Retriever, load_documents, split_documents

    with progress.waiting("Reading documents"):
        if docs:
            loaded = load_documents(docs)
        else:
            sample = samples_path() / "corpus"
            loaded = load_documents([sample], root=sample)
        retriever = BM25Retriever(split_documents(loaded.documents, words=words))
    return Corpus(retriever, (_left_out(loaded.skipped),) if loaded.skipped else ())


def _left_out(skipped: Sequence[Skipped]) -> str:
    # Hidden entries are seldom what the user misses.
    telling = sorted(skipped, key=lambda one: one.reason == "hidden")
    shown = "; ".join(f"{one.label} ({one.reason})" for one in telling[:3])
    more = f"; and {len(skipped) - 3} more" if len(skipped) > 3 else ""
    return f"Left out: {shown}{more}."
