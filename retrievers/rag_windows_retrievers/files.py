"""Which files a list of paths stands for."""

from __future__ import annotations

import glob
import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from rag_windows.errors import DocumentError
from rag_windows.hints import missing

Kind = Literal["text", "markdown", "jsonl", "pdf"]

KINDS: dict[str, Kind] = {
    ".txt": "text",
    ".md": "markdown",
    ".markdown": "markdown",
    ".jsonl": "jsonl",
    ".pdf": "pdf",
}
PDF_MARK = b"%PDF-"
MAX_BYTES = 256 * 2**20
_HEAD = 8192
_BINARY = "binary, not text"
_WIDE_MARKS = (b"\xff\xfe", b"\xfe\xff", b"\x00\x00\xfe\xff")
_CONTROLS = bytes(set(range(32)) - set(b"\b\t\n\f\r\x1b"))
_TEXT_CONTROLS = 0.05
"""Share of control characters above which bytes are no text; random ones have a tenth."""


@dataclass(frozen=True, slots=True)
class Found:
    """A file to read.

    Attributes:
        path: where it is.
        label: how it is called in ids and messages: relative to the root where it lies below that,
            else relative to the parent of the folder that was named.
        kind: how to read it.
    """

    path: Path
    label: str
    kind: Kind


@dataclass(frozen=True, slots=True)
class Skipped:
    """A file, folder or line that was left out, and why.

    Attributes:
        label: how it is called; a line is ``label:number``.
        reason: why it was left out, and for a problem what to do.
        problem: whether it should have been read and could not be: damaged, in another encoding,
            or in need of a package. The others were never meant, such as hidden files.
    """

    label: str
    reason: str
    problem: bool = False


class UnreadableError(DocumentError):
    """A file or line that should be read and can't be."""

    def __init__(self, label: str, reason: str) -> None:
        super().__init__(f"{label}: {reason}")
        self.skipped = Skipped(label, reason, problem=True)


def find_files(
    paths: Iterable[str | Path],
    *,
    max_bytes: int = MAX_BYTES,
    root: Path | None = None,
    strict: bool = True,
) -> tuple[list[Found], list[Skipped]]:
    """List the files behind files, folders (with everything below) and patterns, each file once.

    A file that is named outright must be readable text, or it is an error. Below a folder and
    behind a pattern, hidden entries, other types, binary, empty and over-large files are left out
    and told. Links are followed; a folder that was visited already is not entered again.

    Args:
        paths: for example ``"notes.md"``, ``"docs/"`` or ``"docs/**/*.txt"``; ``~`` is understood.
        max_bytes: size above which a file is not read.
        root: folder that labels are relative to; None is the working directory.
        strict: whether a named file that can't be read, or any unreadable folder, is an error; else
            it is left out as a problem.

    Returns:
        The files, in the order given and sorted by name below a folder, and what was left out.

    Raises:
        DocumentError: a path does not exist, matches nothing, or names something unreadable.
    """
    search = _Search(max_bytes, Path.cwd() if root is None else Path(os.path.abspath(root)), strict)
    for path in paths:
        search.add(os.fspath(path))
    return search.found, list(search.skipped.values())


class _Search:
    def __init__(self, max_bytes: int, root: Path, strict: bool) -> None:
        self.max_bytes = max_bytes
        self.root = root
        self.strict = strict
        self.found: list[Found] = []
        self.skipped: dict[str, Skipped] = {}
        self._files: set[tuple[int, int]] = set()
        self._folders: set[tuple[int, int]] = set()
        self._labels: set[str] = set()

    def add(self, name: str) -> None:
        path = Path(name).expanduser()
        try:
            known = path.stat()
        except (OSError, ValueError) as error:
            if not glob.has_magic(name):
                raise DocumentError(
                    f"{_printable(name)}: {_problem(error)}; name files, folders or quoted "
                    "patterns such as 'docs/**/*.md'."
                ) from error
            self._pattern(path)
            return
        if stat.S_ISDIR(known.st_mode):
            self._folder(path, _parent(path))
        else:
            self._file(path, _parent(path), named=True)

    def _pattern(self, pattern: Path) -> None:
        # pathlib's ** does not follow links; glob's does, round and round.
        try:
            inside = pattern.relative_to(pattern.anchor)
            matches = sorted(Path(pattern.anchor).glob(str(inside)))
        except (OSError, ValueError) as error:
            raise DocumentError(f"{pattern}: {_problem(error)}.") from error
        if not matches:
            raise DocumentError(f"{pattern}: the pattern matches nothing; check it with ls.")
        wants_hidden = any(_hidden(part) for part in pattern.parts)
        for match in matches:
            if not wants_hidden and any(map(_hidden, match.parts)):
                self._skip(match, _parent(match), "hidden")
            elif match.is_dir():
                self._folder(match, _parent(match))
            else:
                self._file(match, _parent(match), named=False)

    def _folder(self, top: Path, base: Path) -> None:
        waiting, files = [top], []
        while waiting:
            folder = waiting.pop()
            try:
                here = folder.stat()
                entries = sorted(folder.iterdir())
            except OSError as error:
                self._unreadable(folder, base, _problem(error), error)
                continue
            if (here.st_dev, here.st_ino) in self._folders:
                if folder.is_symlink():
                    self._skip(folder, base, "a link to a folder that is read already")
                continue
            self._folders.add((here.st_dev, here.st_ino))
            for entry in entries:
                if _hidden(entry.name):
                    self._skip(entry, base, "hidden")
                elif entry.is_dir():
                    waiting.append(entry)
                else:
                    files.append(entry)
        for file in sorted(files):
            self._file(file, base, named=False)

    def _file(self, path: Path, base: Path, *, named: bool) -> None:
        try:
            reason = self._objection(path, named=named)
        except OSError as error:
            if not path.exists() and not named:
                self._skip(path, base, "a broken link")
                return
            self._unreadable(path, base, _problem(error), error)
            return
        if reason is None:
            here = path.stat()
            if (here.st_dev, here.st_ino) not in self._files:
                self._files.add((here.st_dev, here.st_ino))
                self.found.append(Found(path, self._label(path, base), _kind(path)))
        elif named and reason != "empty":
            advice = "; name .txt, .md, .jsonl or .pdf files" if reason == _BINARY else ""
            self._unreadable(path, base, f"{reason}{advice}")
        else:
            wanted = path.suffix.lower() in KINDS and reason != "empty"
            self._skip(path, base, reason, problem=wanted)

    def _unreadable(
        self, path: Path, base: Path, reason: str, cause: Exception | None = None
    ) -> None:
        if self.strict:
            raise UnreadableError(_printable(str(path)), f"{reason}.") from cause
        self._skip(path, base, reason, problem=True)

    def _objection(self, path: Path, *, named: bool) -> str | None:
        here = path.stat()
        suffix = path.suffix.lower()
        if not stat.S_ISREG(here.st_mode):
            return "not a regular file"
        if suffix not in KINDS and not named:
            return "not .txt, .md, .jsonl or .pdf"
        if suffix == ".json":
            return "JSON in one piece is not read (write one object a line, as .jsonl)"
        if here.st_size > self.max_bytes:
            limit = f"{self.max_bytes / 1e6:g} MB"
            return f"{here.st_size / 1e6:g} MB, more than the {limit} that are read"
        head = _head(path)
        if not head:
            return "empty"
        if suffix == ".pdf" or head.startswith(PDF_MARK):
            return None if find_spec("pypdf") else missing("Reading PDF files", "pypdf", "pdf")
        controls = len(head) - len(head.translate(None, _CONTROLS))
        few = b"\x00" not in head and controls <= _TEXT_CONTROLS * len(head)
        return None if few or head.startswith(_WIDE_MARKS) else _BINARY

    def _skip(self, path: Path, base: Path, reason: str, *, problem: bool = False) -> None:
        label = self._relative(path, base)
        self.skipped.setdefault(label, Skipped(label, reason, problem))

    def _label(self, path: Path, base: Path) -> str:
        label = self._relative(path, base)
        if label in self._labels:
            label = _printable(path.absolute().as_posix())
        self._labels.add(label)
        return label

    def _relative(self, path: Path, base: Path) -> str:
        full = Path(os.path.abspath(path))
        for root in (self.root, base):
            if full.is_relative_to(root):
                return _printable(full.relative_to(root).as_posix())
        return _printable(full.name)


def _head(path: Path) -> bytes:
    with path.open("rb") as stream:
        return stream.read(_HEAD)


def _kind(path: Path) -> Kind:
    kind = KINDS.get(path.suffix.lower(), "text")
    return "pdf" if kind == "text" and _head(path).startswith(PDF_MARK) else kind


def _printable(name: str) -> str:
    # Undecodable bytes of a file name arrive as lone surrogates, which no encoder takes.
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _parent(path: Path) -> Path:
    return Path(os.path.abspath(path)).parent


def _hidden(name: str) -> bool:
    return name.startswith(".") and name not in (".", "..")


def _problem(error: OSError | ValueError) -> str:
    if isinstance(error, FileNotFoundError):
        return "no such file or folder"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    return str(error)
