"""From --docs to a retriever."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rag_windows.cli import options
from rag_windows.cli.errors import tell
from rag_windows.cli.progress import Progress
from rag_windows.errors import DocumentError, InputError
from rag_windows.samples import samples_path

if TYPE_CHECKING:
    from rag_windows_retrievers import BM25Retriever, Skipped


_TOLD = 50
"""Problems that are told one by one."""


@dataclass(frozen=True, slots=True)
class SearchOptions:
    """Where passages come from; each field is the option of its name."""

    docs: options.Docs = None
    strict: options.Strict = False
    top_k: options.TopK = 8
    passage_words: options.PassageWords = 120

    def check_reader(self, model: str | None) -> None:
        """The shipped model reads its own sample corpus and no other, unless it is named.

        Args:
            model: as named by --model or RAG_WINDOWS_MODEL, or None.

        Raises:
            InputError: documents, and no model named to read them.
        """
        if model is not None or not self.docs:
            return
        error = InputError(
            "--docs needs a model that can read them: name one with --model or in "
            "RAG_WINDOWS_MODEL, a local folder or a name on the Hub such as "
            "Qwen/Qwen2.5-1.5B-Instruct or meta-llama/Llama-3.1-8B-Instruct."
        )
        error.add_note(
            "The shipped tiny-reader knows only the sample corpus; --model tiny-reader forces it."
        )
        raise error


@dataclass(frozen=True, slots=True)
class Corpus:
    """Documents that can be searched, and what the user should know about them."""

    retriever: BM25Retriever
    notes: tuple[str, ...]


def open_corpus(search: SearchOptions, progress: Progress) -> Corpus:
    """Read documents, tell which can't be read, split the rest into passages and index these.

    Args:
        search: what to read.
        progress: shows what goes on.

    Raises:
        DocumentError: nothing to read, see `rag_windows_retrievers.load_documents`; or, where the
            options are strict, something that can't be read.
        RetrievalError: no passage holds a word.
    """
    from rag_windows_retrievers import BM25Retriever, load_documents, split_documents

    # It warns of oddities inside files that it reads all the same.
    logging.getLogger("pypdf").setLevel(logging.ERROR)
    with progress.waiting("Reading documents"):
        if search.docs:
            loaded = load_documents(search.docs, strict=False)
        else:
            sample = samples_path() / "corpus"
            loaded = load_documents([sample], root=sample)
        problems = [one for one in loaded.skipped if one.problem]
        if problems and search.strict:
            raise _refused(problems)
        retriever = BM25Retriever(split_documents(loaded.documents, words=search.passage_words))
    if problems:
        tell(f"Not read: {len(problems)} of the documents' files and lines (--strict stops there).")
        for line in _listed(problems):
            tell(line)
    others = [one for one in loaded.skipped if not one.problem]
    return Corpus(retriever, (_left_out(others),) if others else ())


def _refused(problems: Sequence[Skipped]) -> DocumentError:
    if len(problems) == 1:
        return DocumentError(f"{problems[0].label}: {problems[0].reason}")
    error = DocumentError(
        f"{len(problems)} of the documents' files and lines can't be read; mend them, or leave "
        "--strict out to read the others."
    )
    for line in _listed(problems):
        error.add_note(line)
    return error


def _listed(problems: Sequence[Skipped]) -> list[str]:
    lines = [f"- {one.label}: {one.reason}" for one in problems[:_TOLD]]
    return [*lines, f"- and {len(problems) - _TOLD} more"] if len(problems) > _TOLD else lines


def _left_out(skipped: Sequence[Skipped]) -> str:
    # Hidden entries are seldom what the user misses.
    telling = sorted(skipped, key=lambda one: one.reason == "hidden")
    shown = "; ".join(f"{one.label} ({one.reason})" for one in telling[:3])
    more = f"; and {len(skipped) - 3} more" if len(skipped) > 3 else ""
    return f"Left out: {shown}{more}."
