"""Text, Markdown, JSONL and PDF files into documents, and documents into passages."""

from __future__ import annotations

import glob
import io
import itertools
import json
import os
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import AliasChoices, BaseModel, Field

from rag_windows import Passage
from rag_windows.errors import DocumentError, InputError, missing

SUFFIXES = {
    ".txt": "text",
    ".md": "markdown",
    ".markdown": "markdown",
    ".jsonl": "jsonl",
    ".pdf": "pdf",
}
"""A file name's suffix -> how it is read; files of other suffixes are read only when named."""

DEFAULT_WORDS = 120

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
    """A file, folder or line that was left out, and why.

    Attributes:
        label: its name, see `load_documents`; a line is ``label:number``.
        reason: why it was left out, and for a problem what to do.
        problem: whether it should have been read and could not be: damaged, in another encoding,
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


def load_documents(
    paths: Iterable[str | Path], *, root: Path | None = None, strict: bool = True
) -> Documents:
    """Read every document behind files, folders (with everything below) and patterns, each once.

    Text, markdown and PDF files (through `pypdf`) are one document each; a JSONL file holds one a
    line, an object with ``text`` (or ``page_content``), and optionally ``id`` (or ``_id``),
    ``title`` and ``metadata``; other keys join the metadata. Text files are UTF-8.

    Below a folder and behind a pattern, hidden entries, other types, empty files and linked folders
    are left out. Files come in the order given, and sorted by name below a folder.

    Args:
        paths: for example ``"notes.md"``, ``"docs/"`` or ``"docs/**/*.txt"``; ``~`` is understood.
        root: folder that labels, and so ids, are relative to; None is the working directory.
        strict: whether a file, a folder or a line that can't be read is an error. Else it is left
            out, as a `Skipped` whose ``problem`` is true, and the rest is read.

    Raises:
        DocumentError: a path does not exist or matches nothing, there is no text at all, or, with
            ``strict``, something can't be read; the message names file and line.
    """
    names = [os.fspath(path) for path in paths]
    loader = _Loader(root or Path(), strict)
    for name in names:
        loader.add(name)
    if not loader.documents:
        told = sorted(loader.skipped, key=lambda one: not one.problem)[:3]
        examples = ", ".join(f"{one.label}: {one.reason}" for one in told)
        left_out = f" ({len(loader.skipped)} left out: {examples})" if told else ""
        raise DocumentError(
            f"No text found in {', '.join(names) or 'nothing'}{left_out}; "
            "name .txt, .md, .jsonl or .pdf files, or a folder of them, that hold some."
        )
    return Documents(tuple(loader.documents), tuple(loader.skipped))


class _Loader:
    """Walks through what was named, reads it, and keeps what was left out."""

    def __init__(self, root: Path, strict: bool) -> None:
        self.documents: list[Document] = []
        self.skipped: list[Skipped] = []
        self._root, self._strict = root, strict
        self._read: set[Path] = set()

    def add(self, name: str) -> None:
        given = Path(name).expanduser()
        tops = [given]
        try:
            if named := not glob.has_magic(name) or given.exists():
                given.stat()
            else:
                # pathlib's ** does not follow links; glob's does, round and round.
                tops = sorted(Path(given.anchor).glob(str(given.relative_to(given.anchor))))
        except (OSError, ValueError) as error:
            raise DocumentError(
                f"{_encodable(name)}: {_reason(error)}; name files, folders or quoted patterns "
                "such as 'docs/**/*.md'."
            ) from error
        if not tops:
            raise DocumentError(f"{given}: the pattern matches nothing; check it with ls.")
        for top in tops:
            for path in self._below(top) if top.is_dir() else [top]:
                if not any(one.startswith(".") for one in path.parts if one not in given.parts):
                    label = Path(os.path.relpath(path, self._root)).as_posix()
                    self._file(path, _encodable(label), named and path is top)

    def _below(self, top: Path) -> list[Path]:
        """All files of a folder; links to folders are not followed."""

        def unreadable(error: OSError) -> None:
            self._leave_out(str(error.filename), _reason(error), error)

        found = []
        for folder, folders, files in os.walk(top, onerror=unreadable):
            folders[:] = [name for name in folders if not name.startswith(".")]
            found += [Path(folder, name) for name in files]
        return sorted(found)

    def _file(self, path: Path, label: str, named: bool) -> None:
        suffix, whole = path.suffix.lower(), path.resolve()
        kind = SUFFIXES.get(suffix, "text")
        if not path.is_file():
            return self._leave_out(label, "no regular file", problem=named)
        if suffix not in SUFFIXES and not named:
            return self._leave_out(label, "not .txt, .md, .jsonl or .pdf", problem=False)
        if whole in self._read:
            return None
        self._read.add(whole)
        try:
            data = path.read_bytes()
            if data.startswith(b"%PDF-") or kind == "pdf":
                text, title = _pdf(data)
            elif b"\x00" in data:
                raise DocumentError("binary, not UTF-8 text; name .txt, .md, .jsonl or .pdf files")
            else:
                text, title = _plain_lines(data.decode("utf-8-sig")), ""
        except UnicodeDecodeError as error:
            line = data.count(b"\n", 0, error.start) + 1
            advice = f"convert the file, for example with: iconv -f WINDOWS-1252 -t UTF-8 {label}"
            reason = f"not valid {error.encoding.upper()} (byte {error.start}); {advice}"
            return self._leave_out(f"{label}:{line}", reason, error)
        except (OSError, DocumentError) as error:
            return self._leave_out(label, _reason(error), error)
        if kind == "markdown":
            title, text = _first_heading(text)
        if kind != "jsonl":
            return self._keep(Document(text, label, title or path.stem, metadata={"source": label}))
        # Not splitlines: U+2028 and its like may stand inside a JSON string.
        for number, row in enumerate(text.split("\n"), start=1):
            if row.strip():
                place = f"{label}:{number}"
                try:
                    self._keep(_Row.model_validate(json.loads(row)).document(label, place))
                except (ValueError, RecursionError) as error:
                    self._leave_out(place, _ROW, error)
        return None

    def _keep(self, document: Document) -> None:
        if document.text.strip():
            self.documents.append(document)
        else:
            self._leave_out(document.id, "no text", problem=False)

    def _leave_out(
        self, label: str, reason: str, cause: Exception | None = None, problem: bool = True
    ) -> None:
        if problem and self._strict:
            raise DocumentError(f"{label}: {reason}") from cause
        self.skipped.append(Skipped(_encodable(label), reason, problem))


class _Row(BaseModel, extra="allow", strict=True):
    """A line of a JSONL file."""

    text: str = Field(validation_alias=AliasChoices("text", "page_content"))
    id: str | int | None = Field(None, validation_alias=AliasChoices("id", "_id"))
    title: str | None = None
    metadata: dict[str, Any] | None = None

    def document(self, label: str, place: str) -> Document:
        """The document of a file's line."""
        named = self.id is not None and str(self.id) != ""
        return Document(
            text=_encodable(_plain_lines(self.text)),
            id=_encodable(str(self.id)) if named else place,
            title=_encodable(self.title or "").strip() or None,
            named=named,
            metadata={**(self.model_extra or {}), **(self.metadata or {}), "source": label},
        )


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
    open_end = text.rstrip("#")
    closed = open_end != text and (not open_end or open_end[-1] in " \t")
    return open_end.rstrip() if closed else text


def _pdf(data: bytes) -> tuple[str, str]:
    """Text and title of a PDF file."""
    try:
        from pypdf import PdfReader
        from pypdf.errors import DependencyError, PyPdfError
    except ImportError as error:
        raise DocumentError(missing("Reading PDF files", "pypdf", "pdf")) from error

    broken = (AttributeError, LookupError, OSError, RecursionError, TypeError, ValueError)
    try:
        reader = PdfReader(io.BytesIO(data))
        text = "\n\n".join(page.extract_text() for page in reader.pages)
        title = reader.metadata.title if reader.metadata else None
    except (PyPdfError, DependencyError, ArithmeticError, *broken) as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise DocumentError(f"not a PDF file that pypdf reads ({first}); save it anew.") from error
    if not text.strip():
        raise DocumentError("its pages hold no text; scans need OCR first.")
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
            raise InputError(f"A passage needs at least 1 token, not {self.limit}.")


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
    character of the document is in exactly one passage, except blank space at the cuts. Counted in
    words, a last passage of less than a quarter joins the one before, which may then hold up to
    ``1.25 * words``; a budget in tokens is never exceeded.

    Args:
        document: the document; its title and metadata go with every passage.
        words: aimed-at length, at least 1. A word is a run of visible characters, or one character
            of a script that is written without spaces.
        tokens: a limit in a model's tokens, instead of `words`. The title is not counted.

    Returns:
        Passages with ids ``{document.id}#{n}`` from 1 on; an id that the document's author stated
        stays as it is where one passage holds the whole document. ``metadata`` gains ``start`` and
        ``end``, the passage's characters in `document.text`.

    Raises:
        InputError: ``words`` is below 1, or the budget is too small for a single character.
    """
    text = document.text
    if tokens is not None:
        spans = fitting(text, tokens.count, tokens.limit)
    elif words < 1:
        raise InputError(f"A passage needs at least 1 word, not {words}.")
    else:
        spans = fitting(text, _count_words, words)
        if len(spans) > 1 and _count_words(text[slice(*spans[-1])]) * 4 < words:
            joined = spans[-2][0], spans[-1][1]
            if _count_words(text[slice(*joined)]) <= words * 5 // 4:
                spans[-2:] = [joined]
    keep = document.named and len(spans) == 1
    return tuple(
        Passage(
            text=text[start:end],
            id=document.id if keep else f"{document.id}#{number}",
            title=document.title,
            metadata={**document.metadata, "start": start, "end": end},
        )
        for number, (start, end) in enumerate(spans, start=1)
    )


def _count_words(text: str) -> int:
    return sum(1 for _ in _WORD.finditer(text))


def fitting(text: str, measure: Callable[[str], int], limit: int) -> list[tuple[int, int]]:
    """Stretches of a text as long as fit: (start, end), without blank space around them.

    Lengths need not add up. An `InputError` where a single character is longer.
    """
    spans: list[tuple[int, int]] = []

    def add(start: int, end: int, *borders: re.Pattern[str]) -> None:
        if spans and measure(text[spans[-1][0] : end]) <= limit:
            spans[-1] = (spans[-1][0], end)
        elif measure(text[start:end]) <= limit:
            spans.append((start, end))
        elif borders:
            for first, last in _between(text, start, end, borders[0]):
                add(first, last, *borders[1:])
        else:
            spans.extend(_longest_first(text, start, end, measure, limit))

    for start, end in _between(text, 0, len(text), _PARAGRAPH):
        add(start, end, _SENTENCE, _LINE)
    return spans


def _between(text: str, start: int, end: int, border: re.Pattern[str]) -> Iterator[tuple[int, int]]:
    """Visible text between borders."""
    cuts = [start]
    for match in border.finditer(text, start, end):
        line = text[text.rfind("\n", start, match.start()) + 1 : match.start()]
        # A heading belongs to what follows it.
        if text[match.start()] != "\n" or not _heading(line):
            cuts.append(match.end())
    for first, last in itertools.pairwise([*cuts, end]):
        yield from _visible(text, first, last)


def _visible(text: str, start: int, end: int) -> Iterator[tuple[int, int]]:
    part = text[start:end]
    if part.strip():
        yield start + len(part) - len(part.lstrip()), start + len(part.rstrip())


def _longest_first(
    text: str, start: int, end: int, measure: Callable[[str], int], limit: int
) -> Iterator[tuple[int, int]]:
    """As much as fits, again and again: cut between words where one ends in its second half."""

    def length(stop: int) -> int:
        return measure(text[start:stop])

    while start < end:
        stops = range(start + 1, min(end, start + _LONGEST * limit) + 1)
        fits = bisect_right(stops, limit, key=length)
        if not fits:
            raise InputError(
                f"A passage of {limit} tokens can't hold a character of {length(start + 1)}; "
                "give it more tokens."
            )
        stop = start + fits
        words = text[start:stop].rsplit(maxsplit=1)
        inside = stop < end and not (text[stop - 1].isspace() or text[stop].isspace())
        if inside and len(words) == 2 and len(words[0]) > fits // 2:
            stop = start + len(words[0])
        yield from _visible(text, start, stop)
        start = stop
