"""From --docs to a retriever."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from rag_windows.cli import options
from rag_windows.cli.errors import tell
from rag_windows.cli.render import progress
from rag_windows.errors import DocumentError, InputError
from rag_windows.samples import samples_path

if TYPE_CHECKING:
    from rag_windows_retrievers import BM25Retriever

_TOLD = 50
"""Problems that are told one by one."""


@dataclass(frozen=True, slots=True)
class SearchOptions:
    """Where passages come from; each field is the option of its name."""

    docs: Annotated[
        list[str] | None,
        options.option(
            "PATH",
            "A file, a folder or a quoted pattern, repeated for each: .txt, .md, .pdf, or .jsonl "
            "with id, title, text. Default: the sample corpus.",
        ),
    ] = None
    strict: Annotated[
        bool, options.flag("--strict", "Stop where a file or a line of --docs can't be read.")
    ] = False
    top_k: Annotated[int, options.count("Passages to retrieve.")] = 8
    passage_words: options.PassageWords = 120


def open_corpus(search: SearchOptions, model: str | None) -> tuple[BM25Retriever, list[str]]:
    """Read documents, split them into passages and index these; and what to tell of the documents.

    Raises:
        InputError: documents, and no model named to read them.
        DocumentError: nothing to read, or, with ``--strict``, something that can't be read.
        RetrievalError: no passage holds a word.
    """
    if search.docs and model is None:
        unnamed = InputError(
            "--docs needs a model that can read them: name one with --model or in "
            "RAG_WINDOWS_MODEL, a local folder or a name on the Hub such as "
            "Qwen/Qwen2.5-1.5B-Instruct."
        )
        unnamed.add_note(
            "The shipped tiny-reader knows only the sample corpus; --model tiny-reader forces it."
        )
        raise unnamed
    from rag_windows_retrievers import BM25Retriever, load_documents, split_documents

    # It warns of oddities inside files that it reads all the same.
    logging.getLogger("pypdf").setLevel(logging.ERROR)
    with progress("Reading documents"):
        if search.docs:
            loaded = load_documents(search.docs, strict=False)
        else:
            sample = samples_path() / "corpus"
            loaded = load_documents([sample], root=sample)
        problems = [f"- {one.label}: {one.reason}" for one in loaded.skipped if one.problem]
        listed = problems[:_TOLD]
        if len(problems) > _TOLD:
            listed.append(f"- and {len(problems) - _TOLD} more")
        if problems and search.strict:
            error = DocumentError(
                f"{len(problems)} of the documents' files and lines can't be read; mend them, or "
                "leave --strict out to read the others."
                if len(problems) > 1
                else problems[0].removeprefix("- ")
            )
            for line in listed if len(problems) > 1 else ():
                error.add_note(line)
            raise error
        retriever = BM25Retriever(split_documents(loaded.documents, words=search.passage_words))
    if problems:
        tell(f"Not read: {len(problems)} of the documents' files and lines (--strict stops there).")
        for line in listed:
            tell(line)
    others = [one for one in loaded.skipped if not one.problem]
    if not others:
        return retriever, []
    shown = "; ".join(f"{one.label} ({one.reason})" for one in others[:3])
    more = f"; and {len(others) - 3} more" if len(others) > 3 else ""
    return retriever, [f"Left out: {shown}{more}."]
