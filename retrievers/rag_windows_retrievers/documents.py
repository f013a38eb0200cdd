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

_BINARY = "binary, not text"
_PDF_MARK = b"%PDF-"
_ENCODINGS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_CONTROLS = bytes(set(range(32)) - set(b"\b\t\n\f\r\x1b"))
_TEXT_CONTROLS = 0.05
"""Share of control characters above which bytes are no text; random ones have a tenth."""

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
    if not names:
        raise DocumentError("No documents were named; give at least one file or folder.")
    loader = _Loader(max_bytes, Path(os.path.abspath(root or ".")), strict)
    for name in names:
        loader.add(name)
    skipped = tuple(loader.skipped.values())
    if not loader.documents:
        told = sorted(skipped, key=lambda one: not one.problem)[:3]
        examples = ", ".join(f"{one.label}: {one.reason}" for one in told)
        more = ", ..." if len(skipped) > 3 else ""
        left_out = f" ({len(skipped)} left out: {examples}{more})" if skipped else ""
        raise DocumentError(
            f"No text found in {', '.join(names)}{left_out}; "
            "give .txt, .md, .jsonl or .pdf files that hold some."
        )
    return Documents(tuple(loader.documents), skipped)


class _UnreadableError(Exception):
    """A file or line that should be read and can't be."""

    def __init__(self, label: str, reason: str) -> None:
        super().__init__(label, reason)
        self.label, self.reason = label, reason


class _Loader:
    """Walks through what was named, reads it, and keeps what was left out by its label."""

    def __init__(self, max_bytes: int, root: Path, strict: bool) -> None:
        self.documents: list[Document] = []
        self.skipped: dict[str, Skipped] = {}
        self._max_bytes, self._root, self._strict = max_bytes, root, strict
        self._visited: set[tuple[int, int]] = set()
        self._labels: set[str] = set()

    def add(self, name: str) -> None:
        path = Path(name).expanduser()
        try:
            path.stat()
        except (OSError, ValueError) as error:
            if not glob.has_magic(name):
                raise DocumentError(
                    f"{_printable(name)}: {_reason(error)}; name files, folders or quoted "
                    "patterns such as 'docs/**/*.md'."
                ) from error
            self._pattern(path)
        else:
            self._walk(path, named=True)

    def _pattern(self, pattern: Path) -> None:
        # pathlib's ** does not follow links; glob's does, round and round.
        try:
            inside = pattern.relative_to(pattern.anchor)
            matches = sorted(Path(pattern.anchor).glob(str(inside)))
        except (OSError, ValueError) as error:
            raise DocumentError(f"{pattern}: {_reason(error)}.") from error
        if not matches:
            raise DocumentError(f"{pattern}: the pattern matches nothing; check it with ls.")
        wants_hidden = any(map(_hidden, pattern.parts))
        for match in matches:
            if not wants_hidden and any(map(_hidden, match.parts)):
                self._skip(self._relative(match, _parent(match)), "hidden")
            else:
                self._walk(match, named=False)

    def _walk(self, top: Path, *, named: bool) -> None:
        base, waiting = _parent(top), [top]
        while waiting:
            path = waiting.pop()
            if path.is_dir():
                waiting += reversed(self._entries(path, base))
            else:
                self._file(path, base, named=named and path is top)

    def _entries(self, folder: Path, base: Path) -> list[Path]:
        try:
            here, entries = folder.stat(), sorted(folder.iterdir())
        except OSError as error:
            self._unreadable(folder, base, _reason(error), error)
            return []
        if (here.st_dev, here.st_ino) in self._visited:
            if folder.is_symlink():
                label = self._relative(folder, base)
                self._skip(label, "a link to a folder that is read already")
            return []
        self._visited.add((here.st_dev, here.st_ino))
        for entry in entries:
            if _hidden(entry.name):
                self._skip(self._relative(entry, base), "hidden")
        return [entry for entry in entries if not _hidden(entry.name)]

    def _file(self, path: Path, base: Path, *, named: bool) -> None:
        suffix = path.suffix.lower()
        try:
            here = path.stat()
            reason = self._objection(here, suffix, named)
            if reason is None and (here.st_dev, here.st_ino) in self._visited:
                return
            data = path.read_bytes() if reason is None else b""
        except OSError as error:
            if named or path.exists():
                self._unreadable(path, base, _reason(error), error)
            else:
                self._skip(self._relative(path, base), "a broken link")
            return
        kind = "pdf" if data.startswith(_PDF_MARK) else SUFFIXES.get(suffix, "text")
        reason = reason or _not_text(data, kind)
        if reason is None:
            self._visited.add((here.st_dev, here.st_ino))
            self._read(data, kind, self._label(path, base))
        elif named and reason != "empty":
            advice = "; name .txt, .md, .jsonl or .pdf files" if reason == _BINARY else ""
            self._unreadable(path, base, f"{reason}{advice}")
        else:
            wanted = suffix in SUFFIXES and reason != "empty"
            self._skip(self._relative(path, base), reason, problem=wanted)

    def _objection(self, here: os.stat_result, suffix: str, named: bool) -> str | None:
        if not stat.S_ISREG(here.st_mode):
            return "not a regular file"
        if suffix not in SUFFIXES and not named:
            return "not .txt, .md, .jsonl or .pdf"
        if suffix == ".json":
            return "JSON in one piece is not read (write one object a line, as .jsonl)"
        if here.st_size > self._max_bytes:
            limit = f"{self._max_bytes / 1e6:g} MB"
            return f"{here.st_size / 1e6:g} MB, more than the {limit} that are read"
        return None

    def _read(self, data: bytes, kind: str, label: str) -> None:
        try:
            text, title = _pdf(data, label) if kind == "pdf" else (_decode(data, label), None)
        except _UnreadableError as error:
            self._problem(error.label, error.reason, error)
            return
        if kind == "markdown":
            title, text = _first_heading(text)
        if kind == "jsonl":
            # Not splitlines: U+2028 and its like may stand inside a JSON string.
            for number, line in enumerate(text.split("\n"), start=1):
                if line.strip():
                    self._line(line, label, f"{label}:{number}")
        else:
            title = title or Path(label).stem
            self._keep(Document(text, label, title, metadata={"source": label}))

    def _line(self, line: str, label: str, place: str) -> None:
        try:
            self._keep(_document(line, label, place))
        except _UnreadableError as error:
            self._problem(error.label, error.reason, error)

    def _keep(self, document: Document) -> None:
        if document.text.strip():
            self.documents.append(document)
        else:
            self._skip(document.id, "no text")

    def _skip(self, label: str, reason: str, *, problem: bool = False) -> None:
        self.skipped.setdefault(label, Skipped(label, reason, problem))

    def _problem(self, label: str, reason: str, cause: BaseException | None = None) -> None:
        if self._strict:
            raise DocumentError(f"{label}: {reason}") from cause
        self._skip(label, reason, problem=True)

    def _unreadable(
        self, path: Path, base: Path, reason: str, cause: BaseException | None = None
    ) -> None:
        if self._strict:
            self._problem(_printable(str(path)), f"{reason}.", cause)
        self._problem(self._relative(path, base), reason, cause)

    def _label(self, path: Path, base: Path) -> str:
        label = self._relative(path, base)
        if label in self._labels:
            label = _printable(path.absolute().as_posix())
        self._labels.add(label)
        return label

    def _relative(self, path: Path, base: Path) -> str:
        full = Path(os.path.abspath(path))
        for root in (self._root, base):
            if full.is_relative_to(root):
                return _printable(full.relative_to(root).as_posix())
        return _printable(full.name)


def _not_text(data: bytes, kind: str) -> str | None:
    head = data[:8192]
    if not head:
        return "empty"
    if kind == "pdf":
        return None if find_spec("pypdf") else missing("Reading PDF files", "pypdf", "pdf")
    controls = len(head) - len(head.translate(None, _CONTROLS))
    few = b"\x00" not in head and controls <= _TEXT_CONTROLS * len(head)
    return None if few or _encoding(head) != "utf-8" else _BINARY


def _encoding(data: bytes) -> str:
    return next((name for mark, name in _ENCODINGS if data.startswith(mark)), "utf-8")


def _decode(data: bytes, label: str) -> str:
    encoding = _encoding(data)
    try:
        return _plain_lines(data.decode(encoding))
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise _UnreadableError(
            f"{label}:{line}",
            f"not valid {encoding.upper()} (byte {error.start}); convert the file, for example "
            f"with: iconv -f WINDOWS-1252 -t UTF-8 {label}",
        ) from error


def _plain_lines(text: str) -> str:
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


def _heading(line: str) -> str | None:
    """What a line of the form ``## Title ##`` names; None for other lines, and without a name."""
    match = _HEADING.match(line)
    if match is None:
        return None
    text = match[1].strip()
    open_end = text.rstrip("#")
    closed = open_end != text and (not open_end or open_end[-1] in " \t")
    return (open_end.rstrip() if closed else text) or None


def _pdf(data: bytes, label: str) -> tuple[str, str | None]:
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
        raise _UnreadableError(
            label, f"not a PDF file that pypdf reads ({first}); save it anew, or as text."
        ) from error
    if not text.strip():
        raise _UnreadableError(label, "its pages hold no text; scans need OCR first.")
    return _encodable(text), _encodable(title).strip() if isinstance(title, str) else ""


def _document(line: str, label: str, place: str) -> Document:
    """The document that a line of JSON holds."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        problem = error.msg if isinstance(error, json.JSONDecodeError) else "too deep or too large"
        raise _UnreadableError(
            place,
            f"not a JSON object ({problem}); each line must be one, "
            'for example {"id": "a", "title": "A", "text": "..."}.',
        ) from error
    if not isinstance(row, dict):
        raise _UnreadableError(place, 'each line must be a JSON object with a "text".')
    text, other_text = row.pop("text", None), row.pop("page_content", None)
    text = other_text if text is None else text
    identity, other_identity = row.pop("id", None), row.pop("_id", None)
    identity = other_identity if identity is None else identity
    title, metadata = row.pop("title", None), row.pop("metadata", None) or {}
    for right, problem in (
        (isinstance(text, str), 'the object needs a "text" that is a string.'),
        (
            isinstance(identity, str | int | None) and not isinstance(identity, bool),
            '"id" must be a string or a whole number.',
        ),
        (isinstance(title, str | None), '"title" must be a string.'),
        (isinstance(metadata, dict), '"metadata" must be an object.'),
    ):
        if not right:
            raise _UnreadableError(place, problem)
    named = identity is not None and str(identity) != ""
    return Document(
        text=_encodable(_plain_lines(text)),
        id=_encodable(str(identity)) if named else place,
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


def _parent(path: Path) -> Path:
    return Path(os.path.abspath(path)).parent


def _hidden(name: str) -> bool:
    return name.startswith(".") and name not in (".", "..")


def _reason(error: OSError | ValueError) -> str:
    if isinstance(error, FileNotFoundError):
        return "no such file or folder"
    return (getattr(error, "strerror", None) or str(error)).lower()
