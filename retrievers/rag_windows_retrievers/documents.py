"""Text, Markdown, JSONL and PDF files, here or in a store, into documents and passages."""

from __future__ import annotations

import glob
import io
import itertools
import json
import os
import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePath, PurePosixPath
from typing import Any

from pydantic import AliasChoices, BaseModel, Field

from rag_windows import Passage, with_neighbours
from rag_windows.errors import DocumentError, InputError, MissingExtraError, require

SUFFIXES = (".txt", ".md", ".markdown", ".jsonl", ".pdf")
"""Files of other suffixes are read only when named, as plain text."""

DEFAULT_WORDS = 120

READERS = 16
"""Files of a store that are read at a time, as each takes a round trip or more."""

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_SURROGATE = re.compile("[\ud800-\udfff]")
_FENCE = re.compile(r" {0,3}(```|~~~)")
_HEADING = re.compile(r" {0,3}#{1,6}[ \t](.*)")
_ROW = (
    'not a JSON object such as {"text": "...", "id": "a", "title": "A", "metadata": {}}, of which '
    'only "text" is needed.'
)


@dataclass(frozen=True, slots=True)
class Document:
    """One text before it is split.

    Attributes:
        text: the whole text, its lines ending in a line feed alone.
        id: the id that a JSONL line states, else the file's label (``label:line`` for JSONL).
        title: what a JSONL line or a PDF file states, a markdown file's first heading, or the stem
            of the file's name.
        named: whether `id` was stated by the line itself and should survive as it is.
        metadata: ``source`` (the file's label) and a JSONL line's other keys.
    """

    text: str
    id: str
    title: str | None = None
    named: bool = False
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Skipped:
    """A file, folder or line (``label:number``) that was left out, and why.

    It is a problem where it should have been read and could not be: damaged, in another encoding,
    or in need of a package. The others were never meant, such as pictures.
    """

    label: str
    reason: str
    problem: bool = False


@dataclass(frozen=True, slots=True)
class Documents:
    """What was read, and what was left out and why."""

    documents: tuple[Document, ...]
    skipped: tuple[Skipped, ...]


@dataclass(frozen=True, slots=True)
class DocumentFile:
    """A file that was found and is not read yet; whoever reaches its path can read it.

    Attributes:
        path: the whole path, or a URL that `fsspec` knows.
        label: what names the file in ids, sources and errors.
        options: those of `fsspec` for the store of a URL, None for a file here.
    """

    path: str
    label: str
    options: Mapping[str, Any] | None = None

    def read(self) -> list[Document | Skipped]:
        """Its documents, and what of it can't be used and why; never raises for a bad file."""
        found: list[Document | Skipped] = []
        try:
            data = self._bytes()
            for one in _documents(data, self.label, PurePath(self.path)):
                if isinstance(one, Document) and not one.text.strip():
                    found.append(Skipped(one.id, "no text"))
                else:
                    found.append(one)
        except UnicodeDecodeError as error:
            line = data.count(b"\n", 0, error.start) + 1
            encoding = error.encoding.upper()
            advice = (
                f"convert the file, for example with: iconv -f WINDOWS-1252 -t UTF-8 {self.label}"
            )
            reason = f"not valid {encoding} (byte {error.start}); {advice}"
            found.append(Skipped(f"{self.label}:{line}", reason, problem=True))
        except (OSError, DocumentError, MissingExtraError) as error:
            found.append(Skipped(self.label, _reason(error), problem=True))
        return found

    def _bytes(self) -> bytes:
        if self.options is None:
            return Path(self.path).read_bytes()
        import fsspec

        with _as_os_errors():
            system, path = fsspec.url_to_fs(self.path, **self.options)
            data: bytes = system.cat_file(path)
            return data


def load_documents(
    paths: Iterable[str | Path],
    *,
    root: Path | None = None,
    strict: bool = True,
    storage_options: Mapping[str, Any] | None = None,
) -> Documents:
    """Read every document behind files, folders (with everything below) and patterns, each once.

    Text, markdown and PDF files (through `pypdf`) are one document each; a JSONL file holds one a
    line, an object with ``text`` (or ``page_content``), and optionally ``id`` (or ``_id``),
    ``title`` and ``metadata``; other keys join the metadata. Text files are UTF-8.

    Below a folder and behind a pattern, hidden entries, other types, empty files and linked folders
    are left out. Files come in the order given, and sorted by name below a folder.

    Args:
        paths: for example ``"notes.md"``, ``"docs/"`` or ``"docs/**/*.txt"``; ``~`` is understood.
            URLs such as ``"s3://bucket/docs/**/*.md"`` are read through `fsspec`, which knows
            S3, GCS, Azure and others; a file's URL is its label then.
        root: folder that labels, and so ids, are relative to; None is the working directory.
        strict: whether a file, a folder or a line that can't be read is an error. Else it is left
            out, as a `Skipped` whose ``problem`` is true, and the rest is read.
        storage_options: of `fsspec`, for the stores of URLs, such as ``{"anon": True}``.

    Raises:
        DocumentError: a path does not exist or matches nothing, there is no text at all, or, with
            ``strict``, something can't be read; the message names file and line.
        MissingExtraError: there is a URL, and `fsspec` is not installed.
    """
    names = [os.fspath(path) for path in paths]
    found = list(found_files(names, root=root, storage_options=storage_options))
    distant = [one for one in found if isinstance(one, DocumentFile) and one.options is not None]
    documents: list[Document] = []
    skipped: list[Skipped] = []
    pool = ThreadPoolExecutor(READERS, "rag-windows-documents")
    try:
        arriving = pool.map(DocumentFile.read, distant)
        for file in found:
            read: Iterable[Document | Skipped] = [file] if isinstance(file, Skipped) else ()
            if isinstance(file, DocumentFile):
                read = file.read() if file.options is None else next(arriving)
            for one in read:
                if isinstance(one, Document):
                    documents.append(one)
                elif one.problem and strict:
                    raise DocumentError(f"{one.label}: {one.reason}")
                else:
                    skipped.append(one)
    finally:
        pool.shutdown(cancel_futures=True)
    if not documents:
        raise no_text(names, skipped)
    return Documents(tuple(documents), tuple(skipped))


def no_text(names: Iterable[str], skipped: Iterable[Skipped]) -> DocumentError:
    """The error of paths behind which there is no text at all."""
    told = sorted(skipped, key=lambda one: not one.problem)
    examples = ", ".join(f"{one.label}: {one.reason}" for one in told[:3])
    left_out = f" ({len(told)} left out: {examples})" if told else ""
    return DocumentError(
        f"No text found in {', '.join(names) or 'nothing'}{left_out}. Name .txt, .md, .jsonl "
        "or .pdf files that hold text, or a folder of them."
    )


def found_files(
    paths: Iterable[str | Path],
    *,
    root: Path | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Iterator[DocumentFile | Skipped]:
    """The files that `load_documents` reads, each once and in order, and what it leaves out."""
    opened: set[str] = set()
    for path in paths:
        name = os.fspath(path)
        if _URL.match(name):
            yield from _in_store(name, dict(storage_options or {}), opened)
        else:
            yield from _here(name, root or Path(), opened)


def _here(name: str, root: Path, opened: set[str]) -> Iterator[DocumentFile | Skipped]:
    """What is behind a file, a folder or a pattern, without the files that were found before."""
    given = Path(os.path.expanduser(name))  # pathlib's raises for a user that nobody knows
    tops = [given]
    try:
        if named := not glob.has_magic(name) or given.exists():
            given.stat()
        else:
            # pathlib's ** does not follow links; glob's does, round and round.
            tops = sorted(Path(given.anchor).glob(str(given.relative_to(given.anchor))))
    except (OSError, ValueError) as error:
        raise DocumentError(
            f"{_encodable(name)}: {_reason(error)}. Name files, folders or quoted patterns such "
            "as 'docs/**/*.md'."
        ) from error
    if not tops:
        raise DocumentError(f"{given}: the pattern matches nothing. Check it with ls.")
    for top in tops:
        paths, errors = [], list[OSError]()
        for folder, folders, files in os.walk(top, onerror=errors.append):
            folders[:] = [one for one in folders if not one.startswith(".")]
            paths += [Path(folder, one) for one in files]
        for refused in errors if top.is_dir() else ():
            yield Skipped(_encodable(str(refused.filename)), _reason(refused), problem=True)
        for path in sorted(paths) if top.is_dir() else [top]:
            label = _encodable(Path(os.path.relpath(path, root)).as_posix())
            alone = named and path is top
            if _hidden(path, given):
                continue
            if not path.is_file():
                yield Skipped(label, "not a regular file", problem=alone)
            else:
                file = DocumentFile(os.path.abspath(path), label)
                yield from _once(file, str(path.resolve()), alone, opened)


def _in_store(
    name: str, options: dict[str, Any], opened: set[str]
) -> Iterator[DocumentFile | Skipped]:
    """`_here` for a URL."""
    require("Reading documents by URL", "fsspec", extra="shared")
    import fsspec

    if "::" in name:
        raise DocumentError(f"{name}: URLs inside URLs are not read. Unpack the archive first.")
    try:
        with _as_os_errors():
            system, path = fsspec.url_to_fs(name, **options)
            pattern = glob.has_magic(path) and not system.exists(path)
            tops = system.glob(path, detail=True) if pattern else {path: system.info(path)}
            found = {
                # Of a web page, find() would follow the links.
                top: [top] if info["type"] == "file" else sorted(system.find(top))
                for top, info in sorted(tops.items())
            }
    except OSError as error:
        reason = _reason(error).strip().rstrip(".")
        raise DocumentError(
            f"{_encodable(name)}: {reason}. Check the URL and the credentials of its store."
        ) from error
    if not tops:
        raise DocumentError(f"{name}: the pattern matches nothing. Check it with ls.")
    for top, files in found.items():
        for one in files:
            if not _hidden(PurePosixPath(one), PurePosixPath(path)):
                url = system.unstrip_protocol(one)
                file = DocumentFile(url, _encodable(url), options)
                yield from _once(file, url, one == top and not pattern, opened)


def _once(
    file: DocumentFile, identity: str, named: bool, opened: set[str]
) -> Iterator[DocumentFile | Skipped]:
    if PurePath(file.path).suffix.lower() not in SUFFIXES and not named:
        yield Skipped(file.label, "not .txt, .md, .jsonl or .pdf")
    elif identity not in opened:
        opened.add(identity)
        yield file


def _hidden(path: PurePath, given: PurePath) -> bool:
    return any(one.startswith(".") for one in path.parts if one not in given.parts)


@contextmanager
def _as_os_errors() -> Iterator[None]:
    """Raise errors of a store's client, each of which has its own, as those of a file here."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise OSError(str(error).strip() or type(error).__name__) from error


def _documents(data: bytes, label: str, path: PurePath) -> Iterator[Document | Skipped]:
    """The documents of a file's bytes."""
    suffix, metadata = path.suffix.lower(), {"source": label}
    if data.startswith(b"%PDF-") or suffix == ".pdf":
        text, title = _pdf(data)
    elif b"\x00" in data:
        raise DocumentError("binary, not UTF-8 text; name .txt, .md, .jsonl or .pdf files")
    else:
        text, title = _plain_lines(data.decode("utf-8-sig")), ""
    if suffix in (".md", ".markdown"):
        title, text = _first_heading(text)
    if suffix != ".jsonl":
        yield Document(text, label, title or path.stem, metadata=metadata)
        return
    # Not splitlines: U+2028 and its like may stand inside a JSON string.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = _Row.model_validate(json.loads(line))
        except (ValueError, RecursionError):
            yield Skipped(f"{label}:{number}", _ROW, problem=True)
            continue
        stated = "" if row.id is None else _encodable(str(row.id))
        yield Document(
            text=_encodable(_plain_lines(row.text)),
            id=stated or f"{label}:{number}",
            title=_encodable(row.title or "").strip() or None,
            named=bool(stated),
            metadata={**(row.model_extra or {}), **(row.metadata or {}), **metadata},
        )


class _Row(BaseModel, extra="allow", strict=True):
    """A line of a JSONL file."""

    text: str = Field(validation_alias=AliasChoices("text", "page_content"))
    id: str | int | None = Field(None, validation_alias=AliasChoices("id", "_id"))
    title: str | None = None
    metadata: dict[str, Any] | None = None


def _plain_lines(text: str) -> str:
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _first_heading(text: str) -> tuple[str, str]:
    """The first heading outside code, and the text without it where it opens the text.

    Every passage carries the title, so the opening heading need not stand in the first one again.
    """
    lines, fence = text.split("\n"), None
    for number, line in enumerate(lines):
        if mark := _FENCE.match(line):
            fence = None if fence == mark[1] else fence or mark[1]
        elif fence is None and (title := _heading(line)):
            rest = "\n".join(lines[number + 1 :])
            opens = not "".join(lines[:number]).strip()
            return title, rest if opens and rest.strip() else text
    return "", text


def _heading(line: str) -> str:
    """What a line of the form ``## Title ##`` names; nothing for other lines."""
    match = _HEADING.match(line)
    text = match[1].strip() if match else ""
    words, _, closing = text.rpartition(" ")
    return text if closing.strip("#") else words.rstrip()


def _pdf(data: bytes) -> tuple[str, str]:
    """Text and title of a PDF file."""
    require("Reading PDF files", "pypdf", extra="pdf")
    from pypdf import PdfReader
    from pypdf.errors import DependencyError, FileNotDecryptedError, PyPdfError

    broken = (ArithmeticError, AttributeError, LookupError, OSError, RecursionError)
    try:
        reader = PdfReader(io.BytesIO(data))
        text = "\n\n".join(page.extract_text() for page in reader.pages)
        title = reader.metadata.title if reader.metadata else None
    except FileNotDecryptedError as error:
        raise DocumentError("it opens with a password only; save it without one") from error
    except DependencyError as error:
        raise DocumentError(f"{error}; install that with pip") from error
    except (PyPdfError, TypeError, ValueError, *broken) as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise DocumentError(
            f"not a PDF file that pypdf can read ({first}); save it again as PDF"
        ) from error
    if not text.strip():
        raise DocumentError("its pages hold no text; scanned pages need OCR first")
    return _encodable(text), _encodable(str(title or "")).strip()


def _encodable(text: str) -> str:
    # Lone surrogates, which no encoder takes: JSON can spell them, and bytes of a file's name that
    # can't be decoded arrive as them.
    return _SURROGATE.sub("\ufffd", text)


def _reason(error: Exception) -> str:
    absent = isinstance(error, FileNotFoundError)
    return "no such file or folder" if absent else getattr(error, "strerror", None) or str(error)


# Scripts without spaces count a word a character; a run of 40 characters without a space counts as
# a word too, so that no single "word" can be longer than a passage.
_LONGEST = 40
_WORD = re.compile(rf"[぀-ヿ㐀-䶿一-鿿]|[^\s぀-ヿ㐀-䶿一-鿿]{{1,{_LONGEST}}}")
_PARAGRAPH = re.compile(r"\n[ \t]*\n\s*")
_SENTENCE = re.compile(r"[.!?…][\"”’')\]]*\s+(?=[^\sa-z])|[。！？][”’」』]*")
_LINE = re.compile(r"\n")
_SPACE = re.compile(r"\s")


@dataclass(frozen=True, slots=True)
class TokenBudget:
    """How long a passage may be, in a model's tokens.

    Args:
        limit: tokens of a passage at most, at least 1, else an `InputError`.
        count: text -> number of tokens, without special tokens; `SentenceEncoder.count` is one, and
            ``lambda text: len(tokenizer(text, add_special_tokens=False)["input_ids"])`` another.
    """

    limit: int
    count: Callable[[str], int]

    def __post_init__(self) -> None:
        if self.limit < 1:
            raise InputError(
                f"The limit of a passage must be at least 1 word or token, not {self.limit}."
            )


def split_documents(
    documents: Iterable[Document],
    *,
    words: int = DEFAULT_WORDS,
    tokens: TokenBudget | None = None,
) -> tuple[Passage, ...]:
    """`split_document` for each of them."""
    return tuple(
        passage for one in documents for passage in split_document(one, words=words, tokens=tokens)
    )


def split_document(
    document: Document, *, words: int = DEFAULT_WORDS, tokens: TokenBudget | None = None
) -> tuple[Passage, ...]:
    """Cut a document at paragraph borders, then sentences, then lines, then words.

    Neighbouring short paragraphs share a passage. All text between the first and the last visible
    character of the document is in exactly one passage, except blank space at the cuts.

    Args:
        document: the document; its title and metadata go with every passage.
        words: of a passage at most, at least 1. A word is a run of visible characters, or one
            character of a script that is written without spaces.
        tokens: a limit in a model's tokens, instead of `words`. The title is not counted.

    Returns:
        Passages with ids ``{document.id}#{n}`` from 1 on; an id that the document's author stated
        stays as it is where one passage holds the whole document. ``metadata`` gains ``start`` and
        ``end``, the passage's characters in `document.text`. Each knows its document, its index and
        the texts in front of it, see `rag_windows.with_neighbours`.

    Raises:
        InputError: ``words`` is below 1, or the budget is too small for a single character.
    """
    text, budget = document.text, tokens or TokenBudget(words, _count_words)
    spans = _fitting(text, budget)
    keep = document.named and len(spans) == 1
    passages = (
        Passage(
            text=text[start:end],
            id=document.id if keep else f"{document.id}#{number}",
            title=document.title,
            metadata={**document.metadata, "start": start, "end": end},
            document=document.id,
            index=number - 1,
        )
        for number, (start, end) in enumerate(spans, start=1)
    )
    return tuple(with_neighbours(passages))


def _count_words(text: str) -> int:
    return sum(1 for _ in _WORD.finditer(text))


def _fitting(text: str, budget: TokenBudget) -> list[tuple[int, int]]:
    """Stretches of a text as long as fit, without blank space around them; lengths don't add up."""
    spans: list[tuple[int, int]] = []

    def fits(start: int, end: int) -> bool:
        return budget.count(text[start:end]) <= budget.limit

    def add(start: int, end: int, *borders: re.Pattern[str]) -> None:
        if spans and fits(spans[-1][0], end):
            spans[-1] = (spans[-1][0], end)
        elif fits(start, end):
            spans.append((start, end))
        elif borders:
            for first, last in _between(text, start, end, borders[0]):
                add(first, last, *borders[1:])
        else:
            cut_word(start, end)

    def cut_word(start: int, end: int) -> None:
        while start < end:
            stops = range(start + 1, min(end, start + _LONGEST * budget.limit) + 1)
            stop = start + bisect_left(stops, True, key=lambda stop: not fits(start, stop))
            if stop == start:
                raise InputError(
                    f"A passage of {budget.limit} tokens can't hold the character "
                    f"{text[start]!r}, which has {budget.count(text[start])}. Use a larger limit."
                )
            spans.append((start, stop))
            start = stop

    for start, end in _between(text, 0, len(text), _PARAGRAPH):
        add(start, end, _SENTENCE, _LINE, _SPACE)
    return spans


def _between(text: str, start: int, end: int, border: re.Pattern[str]) -> Iterator[tuple[int, int]]:
    """Visible text between borders; a heading belongs to what follows it."""
    cuts = [start]
    for match in border.finditer(text, start, end):
        before = match.start()
        line = text[text.rfind("\n", start, before) + 1 : before] if text[before] == "\n" else ""
        if border is _SPACE or not _heading(line):
            cuts.append(match.end())
    for first, last in itertools.pairwise([*cuts, end]):
        if part := text[first:last].strip():
            first = text.index(part, first)
            yield first, first + len(part)
