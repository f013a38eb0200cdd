"""Documents out of text, markdown, JSONL and PDF files."""

from __future__ import annotations

import codecs
import glob
import io
import json
import os
import re
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rag_windows.errors import DocumentError, missing

SUFFIXES = {
    ".txt": "text",
    ".md": "markdown",
    ".markdown": "markdown",
    ".jsonl": "jsonl",
    ".pdf": "pdf",
}
"""A file name's suffix -> how it is read; files of other suffixes are read only when named."""

MAX_BYTES = 256 * 2**20

_ENCODINGS = {
    codecs.BOM_UTF8: "utf-8-sig",
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
_SURROGATE = re.compile("[\ud800-\udfff]")
_FENCE = re.compile(r" {0,3}(```|~~~)")
_HEADING = re.compile(r" {0,3}#{1,6}[ \t](.*)")
_UNDERLINE = re.compile(r" {0,3}(=+|-{2,})[ \t]*$")
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
            or in need of a package. The others were never meant, such as hidden files.
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
    paths: Iterable[str | Path],
    *,
    max_bytes: int = MAX_BYTES,
    root: Path | None = None,
    strict: bool = True,
) -> Documents:
    """Read every document behind files, folders (with everything below) and patterns, each once.

    Text, markdown and PDF files (through `pypdf`) are one document each; a JSONL file holds one a
    line, an object with ``text`` (or ``page_content``), and optionally ``id`` (or ``_id``),
    ``title`` and ``metadata``; other keys join the metadata. Text files are UTF-8, or UTF-16 and
    UTF-32 with a byte order mark.

    Below a folder and behind a pattern, hidden entries, other types, binary, empty and over-large
    files are left out. Links are followed; a folder that was visited already is not entered again.
    Files come in the order given, and sorted by name below a folder.

    Args:
        paths: for example ``"notes.md"``, ``"docs/"`` or ``"docs/**/*.txt"``; ``~`` is understood.
        max_bytes: size in bytes above which a file is not read.
        root: folder that labels, and so ids, are relative to; None is the working directory. Files
            outside it are named relative to the parent of the folder that was given.
        strict: whether a named file, a folder or a line that can't be read is an error. Else it is
            left out, as a `Skipped` whose ``problem`` is true, and the rest is read.

    Raises:
        DocumentError: a path does not exist or matches nothing, there is no text at all, or, with
            ``strict``, something can't be read; the message names file and line.
    """
    names = [os.fspath(path) for path in paths]
    loader = _Loader(max_bytes, Path(os.path.abspath(root or ".")), strict)
    for name in names:
        loader.add(name)
    skipped = tuple(loader.skipped.values())
    if not loader.documents:
        told = sorted(skipped, key=lambda one: not one.problem)[:3]
        examples = ", ".join(f"{one.label}: {one.reason}" for one in told)
        left_out = f" ({len(skipped)} left out: {examples})" if skipped else ""
        raise DocumentError(
            f"No text found in {', '.join(names) or 'nothing'}{left_out}; "
            "name .txt, .md, .jsonl or .pdf files, or a folder of them, that hold some."
        )
    return Documents(tuple(loader.documents), skipped)


class _Loader:
    """Walks through what was named, reads it, and keeps what was left out by its label."""

    def __init__(self, max_bytes: int, root: Path, strict: bool) -> None:
        self.documents: list[Document] = []
        self.skipped: dict[str, Skipped] = {}
        self._max_bytes, self._root, self._strict = max_bytes, root, strict
        self._visited: set[tuple[int, int]] = set()
        self._labels: set[str] = set()

    def add(self, name: str) -> None:
        given = Path(name).expanduser()
        tops = [given]
        try:
            if named := not glob.has_magic(name) or given.exists():
                given.stat()
            else:
                # pathlib's ** does not follow links; glob's does, round and round.
                inside = given.relative_to(given.anchor)
                tops = sorted(Path(given.anchor).glob(str(inside)))
        except (OSError, ValueError) as error:
            raise DocumentError(
                f"{_printable(name)}: {_reason(error)}; name files, folders or quoted patterns "
                "such as 'docs/**/*.md'."
            ) from error
        if not tops:
            raise DocumentError(f"{given}: the pattern matches nothing; check it with ls.")
        for top in tops:
            root = Path(os.path.abspath(top)).parent
            waiting = [top]
            while waiting:
                path = waiting.pop()
                full = Path(os.path.abspath(path))
                inside = full.relative_to(self._root if self._root in full.parents else root)
                label = _printable(inside.as_posix())
                if any(_hidden(part) for part in path.parts if part not in given.parts):
                    self._skip(label, "hidden")
                else:
                    waiting += self._visit(path, label, named and path is top)

    def _visit(self, path: Path, label: str, named: bool) -> list[Path]:
        """Read a file; what a folder holds, the last one first."""
        try:
            if not path.is_dir():
                self._file(path, label, named)
            elif not self._again(path):
                return sorted(path.iterdir(), reverse=True)
            elif path.is_symlink():
                self._skip(label, "a link to a folder that is read already")
        except OSError as error:
            if path.is_symlink() and not path.exists():
                self._skip(label, "a broken link")
            else:
                self._fail(label, _reason(error), error)
        return []

    def _again(self, path: Path) -> bool:
        """Whether it was visited before, under whatever name."""
        here = path.stat()
        before = (here.st_dev, here.st_ino) in self._visited
        self._visited.add((here.st_dev, here.st_ino))
        return before

    def _file(self, path: Path, label: str, named: bool) -> None:
        suffix, here = path.suffix.lower(), path.stat()
        data, reason = b"", None
        if not stat.S_ISREG(here.st_mode):
            reason = "not a regular file"
        elif suffix not in SUFFIXES and not named:
            reason = "not .txt, .md, .jsonl or .pdf"
        elif suffix == ".json":
            reason = "JSON in one piece is not read (write one object a line, as .jsonl)"
        elif here.st_size > self._max_bytes:
            sizes = f"{here.st_size / 1e6:g} MB, more than the {self._max_bytes / 1e6:g} MB"
            reason = f"{sizes} that are read"
        elif self._again(path):
            return
        else:
            data = path.read_bytes()
        kind = "pdf" if data.startswith(b"%PDF-") else SUFFIXES.get(suffix, "text")
        encoding = next((_ENCODINGS[mark] for mark in _ENCODINGS if data.startswith(mark)), "utf-8")
        if reason is None and not data:
            self._skip(label, "empty")
            return
        if kind == "pdf" and not find_spec("pypdf"):
            reason = missing("Reading PDF files", "pypdf", "pdf")
        elif kind != "pdf" and encoding == "utf-8" and b"\x00" in data[:8192]:
            reason = "binary, not text; name .txt, .md, .jsonl or .pdf files"
        if reason is None:
            label = _printable(path.absolute().as_posix()) if label in self._labels else label
            self._labels.add(label)
            self._read(data, kind, encoding, label)
        elif named:
            self._fail(label, reason)
        else:
            self._skip(label, reason, problem=suffix in SUFFIXES)

    def _read(self, data: bytes, kind: str, encoding: str, label: str) -> None:
        try:
            text, title = _pdf(data) if kind == "pdf" else (_plain_lines(data.decode(encoding)), "")
        except UnicodeDecodeError as error:
            line = data.count(b"\n", 0, error.start) + 1
            advice = f"convert the file, for example with: iconv -f WINDOWS-1252 -t UTF-8 {label}"
            reason = f"not valid {encoding.upper()} (byte {error.start}); {advice}"
            return self._fail(f"{label}:{line}", reason, error)
        except DocumentError as error:
            return self._fail(label, str(error), error)
        if kind == "markdown":
            title, text = _first_heading(text)
        if kind != "jsonl":
            metadata = {"source": label}
            return self._keep(Document(text, label, title or Path(label).stem, metadata=metadata))
        # Not splitlines: U+2028 and its like may stand inside a JSON string.
        for number, row in enumerate(text.split("\n"), start=1):
            if row.strip():
                place = f"{label}:{number}"
                try:
                    self._keep(_document(row, label, place))
                except (ValueError, TypeError, RecursionError) as error:
                    self._fail(place, _ROW, error)
        return None

    def _keep(self, document: Document) -> None:
        if document.text.strip():
            self.documents.append(document)
        else:
            self._skip(document.id, "no text")

    def _skip(self, label: str, reason: str, *, problem: bool = False) -> None:
        self.skipped.setdefault(label, Skipped(label, reason, problem))

    def _fail(self, label: str, reason: str, cause: BaseException | None = None) -> None:
        if self._strict:
            raise DocumentError(f"{label}: {reason}") from cause
        self._skip(label, reason, problem=True)


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
        if mark or fence:
            continue
        title, first = _heading(line), number
        above, before = ("", "", *lines[max(0, number - 2) : number])[-1:-3:-1]
        if not title and _UNDERLINE.match(line) and above.strip() and not before.strip():
            title, first = above.strip(), number - 1
        if title:
            rest = "\n".join(lines[number + 1 :])
            opens = not "".join(lines[:first]).strip()
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
    from pypdf import PdfReader
    from pypdf.errors import DependencyError, PyPdfError

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


def _document(line: str, label: str, place: str) -> Document:
    """The document that a line of JSON holds; one of several errors for anything else."""
    row = json.loads(line)
    if not isinstance(row, dict):
        raise TypeError

    def first(*names: str) -> Any:
        found = [row.pop(name, None) for name in names]
        return next((one for one in found if one is not None), None)

    text, stated, title = first("text", "page_content"), first("id", "_id"), first("title")
    metadata = first("metadata") or {}
    kinds = ((text, str), (stated, str | int | None), (title, str | None), (metadata, dict))
    if isinstance(stated, bool) or not all(isinstance(one, kind) for one, kind in kinds):
        raise TypeError
    named = stated is not None and str(stated) != ""
    return Document(
        text=_encodable(_plain_lines(text)),
        id=_encodable(str(stated)) if named else place,
        title=_encodable(title) if title and title.strip() else None,
        named=named,
        metadata={**row, **metadata, "source": label},
    )


def _encodable(text: str) -> str:
    # JSON can spell half a surrogate pair, which neither a tokenizer nor a terminal takes.
    return _SURROGATE.sub("\ufffd", text)


def _printable(name: str) -> str:
    # Undecodable bytes of a file name arrive as lone surrogates, which no encoder takes.
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _hidden(name: str) -> bool:
    return name.startswith(".") and name not in (".", "..")


def _reason(error: OSError | ValueError) -> str:
    if isinstance(error, FileNotFoundError):
        return "no such file or folder"
    return (getattr(error, "strerror", None) or str(error)).lower()
