"""Documents out of text, markdown, JSONL and PDF files."""

from __future__ import annotations

import codecs
import io
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rag_windows.errors import DocumentError
from rag_windows_retrievers.files import (
    MAX_BYTES,
    Found,
    Skipped,
    UnreadableError,
    find_files,
)

_ENCODINGS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_SURROGATE = re.compile("[\ud800-\udfff]")
_FENCE = re.compile(r" {0,3}(```|~~~)")
_HEADING = re.compile(r" {0,3}#{1,6}[ \t](.*)")
_UNDERLINE = re.compile(r" {0,3}(=+|-{2,})[ \t]*$")


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
class Documents:
    """What was read, and what was left out and why."""

    documents: tuple[Document, ...]
    skipped: tuple[Skipped, ...]


def load_documents(
    paths: Iterable[str | Path],
    *,
    max_bytes: int = MAX_BYTES,
    root: Path | None = None,
    strict: bool = True,
) -> Documents:
    """Read every document behind files, folders and patterns.

    Text, markdown and PDF files (through `pypdf`) are one document each; a JSONL file holds one a
    line, an object with ``text`` (or ``page_content``), and optionally ``id`` (or ``_id``),
    ``title`` and ``metadata``; other keys join the metadata. Text files are UTF-8,
    or UTF-16 and UTF-32 with a byte order mark.

    Args:
        paths: see `find_files`.
        max_bytes: size in bytes above which a file is not read.
        root: folder that ids are relative to; None is the working directory.
        strict: whether the first file or line that can't be read is an error. Else it is left out,
            as a `Skipped` whose ``problem`` is true, and the rest is read.

    Raises:
        DocumentError: a path does not exist, or there is no text at all; with ``strict`` also where
            a path is unreadable, a line is no such object (the message names file and line), a file
            is in another encoding, or a named PDF file needs a package that is not installed.
    """
    names = [str(path) for path in paths]
    if not names:
        raise DocumentError("No documents were named; give at least one file or folder.")
    found, skipped = find_files(names, max_bytes=max_bytes, root=root, strict=strict)
    documents: list[Document] = []

    def unreadable(error: UnreadableError) -> None:
        if strict:
            raise error
        skipped.append(error.skipped)

    for file in found:
        try:
            for document in _read(file, unreadable):
                if document.text.strip():
                    documents.append(document)
                else:
                    skipped.append(Skipped(document.id, "no text"))
        except UnreadableError as error:
            unreadable(error)
    if not documents:
        left_out = f" ({len(skipped)} left out: {_examples(skipped)})" if skipped else ""
        raise DocumentError(
            f"No text found in {', '.join(names)}{left_out}; "
            "give .txt, .md, .jsonl or .pdf files that hold some."
        )
    return Documents(tuple(documents), tuple(skipped))


def _examples(skipped: list[Skipped]) -> str:
    told = sorted(skipped, key=lambda one: not one.problem)[:3]
    first = ", ".join(f"{one.label}: {one.reason}" for one in told)
    return first + (", ..." if len(skipped) > 3 else "")


_Unreadable = Callable[[UnreadableError], None]


def _read(file: Found, unreadable: _Unreadable) -> Iterator[Document]:
    try:
        data = file.path.read_bytes()
    except OSError as error:
        raise UnreadableError(file.label, f"{(error.strerror or 'unreadable').lower()}.") from error
    if file.kind == "pdf":
        yield _pdf(data, file.label)
        return
    text = _decode(data, file.label)
    stem = Path(file.label).stem
    if file.kind == "jsonl":
        yield from _lines(text, file.label, unreadable)
    elif file.kind == "markdown":
        title, body = _first_heading(text)
        yield Document(body, file.label, title or stem, metadata={"source": file.label})
    else:
        yield Document(text, file.label, stem, metadata={"source": file.label})


def _decode(data: bytes, label: str) -> str:
    encoding = next((name for mark, name in _ENCODINGS if data.startswith(mark)), "utf-8")
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise UnreadableError(
            f"{label}:{line}",
            f"not valid {encoding.upper()} (byte {error.start}); convert the file, for example "
            f"with: iconv -f WINDOWS-1252 -t UTF-8 {label}",
        ) from error
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _first_heading(text: str) -> tuple[str | None, str]:
    """The first heading outside code, and the text without it where it opens the text.

    Every passage carries the title, so the opening heading need not stand in the first one again.
    """
    lines = text.split("\n")
    fence = None
    for number, line in enumerate(lines):
        if mark := _FENCE.match(line):
            fence = None if fence == mark[1] else fence or mark[1]
            continue
        if fence is not None:
            continue
        above = lines[number - 1].strip() if number else ""
        if heading := _heading(line):
            title, first, after = heading, number, number + 1
        elif above and _UNDERLINE.match(line) and (number < 2 or not lines[number - 2].strip()):
            title, first, after = above, number - 1, number + 1
        else:
            continue
        rest = "\n".join(lines[after:])
        opens = not "".join(lines[:first]).strip()
        return title, rest if opens and rest.strip() else text
    return None, text


def _pdf(data: bytes, label: str) -> Document:
    from pypdf import PdfReader
    from pypdf.errors import DependencyError, PyPdfError

    broken = (AttributeError, LookupError, OSError, RecursionError, TypeError, ValueError)
    try:
        reader = PdfReader(io.BytesIO(data))
        text = "\n\n".join(page.extract_text() for page in reader.pages)
        title = reader.metadata.title if reader.metadata else None
    except (PyPdfError, DependencyError, ArithmeticError, *broken) as error:
        raise UnreadableError(
            label,
            f"not a PDF file that pypdf reads ({_first_line(error)}); save it anew, or as text.",
        ) from error
    if not text.strip():
        raise UnreadableError(label, "its pages hold no text; scans need OCR first.")
    stated = _encodable(title).strip() if isinstance(title, str) else ""
    return Document(_encodable(text), label, stated or Path(label).stem, metadata={"source": label})


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _heading(line: str) -> str | None:
    """What a line of the form ``## Title ##`` names; None for other lines, and without a name."""
    match = _HEADING.match(line)
    if match is None:
        return None
    text = match[1].strip()
    open_end = text.rstrip("#")
    closed = open_end != text and (not open_end or open_end[-1] in " \t")
    return (open_end.rstrip() if closed else text) or None


def _lines(text: str, label: str, unreadable: _Unreadable) -> Iterator[Document]:
    # Not splitlines: U+2028 and its like may stand inside a JSON string.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                document = _line(line, label, f"{label}:{number}")
            except UnreadableError as error:
                unreadable(error)
            else:
                yield document


def _line(line: str, label: str, place: str) -> Document:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        problem = error.msg if isinstance(error, json.JSONDecodeError) else "too deep or too large"
        raise UnreadableError(
            place,
            f"not a JSON object ({problem}); each line must be one, "
            'for example {"id": "a", "title": "A", "text": "..."}.',
        ) from error
    if not isinstance(row, dict):
        raise UnreadableError(place, 'each line must be a JSON object with a "text".')
    text = row.pop("text", None)
    other = row.pop("page_content", None)
    text = other if text is None else text
    if not isinstance(text, str):
        raise UnreadableError(place, 'the object needs a "text" that is a string.')
    identity = row.pop("id", None)
    other = row.pop("_id", None)
    identity = other if identity is None else identity
    if isinstance(identity, bool) or not isinstance(identity, str | int | None):
        raise UnreadableError(place, '"id" must be a string or a whole number.')
    title = row.pop("title", None)
    if not isinstance(title, str | None):
        raise UnreadableError(place, '"title" must be a string.')
    metadata = row.pop("metadata", None) or {}
    if not isinstance(metadata, dict):
        raise UnreadableError(place, '"metadata" must be an object.')
    named = identity is not None and str(identity) != ""
    return Document(
        text=_encodable(text.replace("\r\n", "\n").replace("\r", "\n")),
        id=_encodable(str(identity)) if named else place,
        title=_encodable(title) if title and title.strip() else None,
        named=named,
        metadata={**row, **metadata, "source": label},
    )


def _encodable(text: str) -> str:
    # JSON can spell half a surrogate pair, which neither a tokenizer nor a terminal takes.
    return _SURROGATE.sub("\ufffd", text)
