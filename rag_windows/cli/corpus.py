"""The documents of a command: where they are named, and what finds passages in them."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Protocol

from rag_windows.cli.model_loading import LoadOptions, quieten
from rag_windows.cli.options import (
    DEFAULT_PASSAGE_WORDS,
    Embedder,
    PassageWords,
    Strict,
    TopK,
    option,
)
from rag_windows.cli.render import progress, tell
from rag_windows.errors import CacheError, DocumentError, InputError, RetrievalError
from rag_windows.folders import INDEXES, default_folder, in_home
from rag_windows.samples import samples_path

if TYPE_CHECKING:
    from rag_windows import Passage
    from rag_windows_retrievers import Encoder, Index, Retriever, Skipped


@dataclass(frozen=True, slots=True)
class SearchOptions:
    """Where passages come from; each field becomes the option of the same name."""

    docs: Annotated[
        list[str] | None,
        option(
            "PATH",
            "File, folder, quoted pattern or URL such as s3://bucket/docs; can be repeated. "
            "Default: the sample corpus.",
        ),
    ] = None
    index: Annotated[
        str | None,
        option(
            "DIR",
            "Folder of an index, see rag-windows index; with --docs it is brought up to date with "
            "them first. Default, with --docs: one for these documents in the cache folder.",
        ),
    ] = None
    embedder: Embedder = None
    strict: Strict = False
    top_k: TopK = 8
    passage_words: PassageWords = None


class Corpus(Protocol):
    """Documents' passages, and what finds them."""

    @property
    def passages(self) -> Sequence[Passage]:
        """All of them."""

    def retrieve(self, query: str, k: int = ...) -> list[Passage]:
        """The best ones; see `rag_windows_retrievers.Retriever`."""


@dataclass(frozen=True, slots=True)
class _Fused:
    """A corpus in memory that is searched in two ways."""

    passages: Sequence[Passage]
    both: Retriever

    def retrieve(self, query: str, k: int = 8) -> list[Passage]:
        return self.both.retrieve(query, k)


def open_corpus(search: SearchOptions, model: LoadOptions) -> Corpus:
    """What finds the documents' passages; files that could not be read are reported.

    It is an index on disk, for which only files that have changed are read. The sample corpus, and
    documents where nothing may be written, are read into memory.
    """
    index = _index(search, model)
    if index is not None:
        return index
    passages = _read_passages(search)
    from rag_windows_retrievers import BM25Retriever, DenseRetriever, HybridRetriever

    with progress("Indexing passages"):
        words = BM25Retriever(passages)
    if search.embedder is None:
        return words
    encoder = load_embedder(search.embedder)
    with progress("Embedding passages") as counted:
        meaning = DenseRetriever(passages, encoder, progress=counted)
    return _Fused(words.passages, HybridRetriever([words, meaning]))


def read_passages(search: SearchOptions, model: LoadOptions) -> Sequence[Passage]:
    """The documents' passages; files that could not be read are reported."""
    index = _index(search, model)
    return _read_passages(search) if index is None else index.passages


def how_many(corpus: Corpus) -> int:
    """The number of passages; those of an index are counted without being read."""
    from rag_windows_retrievers import Index

    return len(corpus) if isinstance(corpus, Index) else len(corpus.passages)


def _index(search: SearchOptions, model: LoadOptions) -> Index | None:
    """The index that is named, or that of --docs in the cache folder; None for none."""
    check_documents(search, model.model)
    if search.index is not None:
        return _up_to_date(search, Path(search.index))
    folder = _automatic_index(search, model) if search.docs else None
    if folder is None:
        return None
    try:
        return _up_to_date(search, folder)
    except RetrievalError as error:
        if model.cache_dir is not None:
            raise
        # An answer needs no index on disk.
        tell(f"Note: The documents are read again for each question. {error}")
        return None


def _up_to_date(search: SearchOptions, folder: Path) -> Index:
    """The index, brought up to date with --docs if there are any; what else it has stays."""
    from rag_windows_retrievers import Index, open_index
    from rag_windows_retrievers.documents import no_text

    if not search.docs:
        return with_embedder(open_index(folder), search.embedder)
    with progress("Reading documents") as counted:
        index = Index(folder, words=search.passage_words)
        changes = index.follow(
            search.docs, progress=lambda done, whole: counted(done, whole, "files")
        )
    if not len(index):
        raise no_text(search.docs, changes.skipped)
    tell_left_out(changes.skipped, strict=search.strict)
    return with_embedder(index, search.embedder)


def with_embedder(index: Index, embedder: str | None) -> Index:
    """The index, searched by meaning, too; passages without a vector get one."""
    if embedder is None:
        if (made_by := index.model_name) is not None:
            tell(
                f"Note: Passages are found by words only. The index holds vectors of {made_by}; "
                "name that model with --embedder to find them by meaning, too."
            )
        return index
    from rag_windows_retrievers import Index

    encoder = load_embedder(embedder)
    index.close()
    with progress("Embedding passages") as counted:
        return Index(index.folder, encoder, progress=counted)


def load_embedder(name: str) -> Encoder:
    """A model of sentence-transformers, from a local folder or the Hub."""
    from rag_windows_retrievers import SentenceEncoder

    quieten(verbose=False)
    with progress(f"Loading {name}"):
        from rag_windows.loading import late_bars
    quieten(verbose=False)
    with late_bars():
        return SentenceEncoder(name)


def _automatic_index(search: SearchOptions, model: LoadOptions) -> Path | None:
    """Where the index of --docs lies for the next question; None where nothing is written.

    Labels of files are relative to the working directory, so that each has an index of its own.
    """
    if model.no_cache:
        return None
    named, words = search.embedder, search.passage_words or DEFAULT_PASSAGE_WORDS
    try:
        asked = [
            os.getcwd(),
            [anywhere(os.path.expanduser(one)) for one in search.docs or ()],
            words,
            anywhere(named) if named is not None and os.path.exists(named) else named,
        ]
        folder = (
            index_folder(model.cache_dir)
            / hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:32]
        )
        make_private(folder)
    except CacheError as error:
        if model.cache_dir is not None:
            raise
        tell(f"Note: The documents are read again for each question. {error}")
        return None
    return folder


def anywhere(path: str) -> str:
    """The absolute path of a file or folder; a URL stays as it is."""
    return path if "://" in path else os.path.abspath(path)


def index_folder(cache_dir: str | None) -> Path:
    """The folder of indexes, inside that of the passage cache."""
    return (default_folder() if cache_dir is None else in_home(cache_dir)) / INDEXES


def make_private(folder: Path) -> None:
    """Make a folder of `index_folder` for this user only."""
    try:
        for one in (folder.parent.parent, folder.parent, folder):
            one.mkdir(0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise CacheError(
            f"The folder {folder.parent.parent} can't be used ({error.strerror}). Name another one "
            "with --cache-dir or RAG_WINDOWS_CACHE_DIR."
        ) from error


def _read_passages(search: SearchOptions) -> tuple[Passage, ...]:
    from rag_windows_retrievers import load_documents, split_documents

    with progress("Reading documents"):
        if search.docs:
            loaded = load_documents(search.docs, strict=False)
        else:
            sample = samples_path() / "corpus"
            loaded = load_documents([sample], root=sample)
        words = search.passage_words or DEFAULT_PASSAGE_WORDS
        passages = split_documents(loaded.documents, words=words)
    tell_left_out(loaded.skipped, strict=search.strict)
    return passages


def check_documents(search: SearchOptions, model: str | None) -> None:
    """Refuse documents without a model that could answer over them."""
    if (search.docs or search.index is not None) and model is None:
        needed = "--docs needs a model." if search.docs else "--index needs a model."
        unnamed = InputError(
            f"{needed} Name one with --model or in RAG_WINDOWS_MODEL: a local folder or a name on "
            "the Hub, such as Qwen/Qwen2.5-1.5B-Instruct."
        )
        unnamed.add_note(
            "The shipped tiny-reader can answer over the sample corpus only; to use it all the "
            "same, give --model tiny-reader."
        )
        raise unnamed
    quieten_readers()


def quieten_readers() -> None:
    """Silence the warnings of pypdf and openpyxl about files that they can read nevertheless."""
    logging.getLogger("pypdf").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"openpyxl\.")


def tell_left_out(skipped: Sequence[Skipped], *, strict: bool) -> None:
    """Say which files and lines were not read; an error if they should have been and `strict`."""
    partial = [one for one in skipped if one.partial and not (strict and one.problem)]
    skipped = [one for one in skipped if one not in partial]
    for pages in partial:
        tell(f"Note: {pages.label}: {pages.reason}.")
    bad = [f"{one.label}: {one.reason}" for one in skipped if one.problem]
    of_all = f"{len(bad)} {'file or line' if len(bad) == 1 else 'files or lines'} of the documents"
    if strict and len(bad) == 1:
        raise DocumentError(bad[0])
    if strict and bad:
        error = DocumentError(f"{of_all} can't be read. Correct them, or leave out --strict.")
        for one in bad:
            error.add_note(f"- {one}")
        raise error
    if bad:
        tell(f"Note: {of_all} can't be read; the others are used (--strict stops here):")
    for one in bad:
        tell(f"- {one}")
    others = [f"{one.label} ({one.reason})" for one in skipped if not one.problem]
    if others:
        more = f"; and {len(others) - 3} more" if len(others) > 3 else ""
        tell(f"Note: Left out: {'; '.join(others[:3])}{more}.")
