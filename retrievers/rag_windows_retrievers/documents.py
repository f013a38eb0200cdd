"""Files of text, PDF files and those of `formats`, here or in a store, as documents."""

from __future__ import annotations

import codecs
import glob
import io
import itertools
import json
import math
import os
import re
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePath, PurePosixPath
from typing import Any

from pydantic import AliasChoices, BaseModel, Field

from rag_windows.errors import DocumentError, InputError, MissingExtraError, require
from rag_windows_retrievers.conversion import first_line, numbered
from rag_windows_retrievers.formats import FORMATS, convert
from rag_windows_retrievers.structure import front_matter, structure_of

SUFFIXES = (".txt", ".md", ".markdown", ".jsonl", ".pdf", *FORMATS)
"""Files of other suffixes are read only when named, as plain text."""

_SHOWN = [one for one in SUFFIXES if one not in (".markdown", ".htm")]
_KINDS = f"{', '.join(_SHOWN[:-1])} or {_SHOWN[-1]}"

TITLE_WORDS = 32
"""Of a title that goes with every passage, at most."""

READERS = 16
"""Files of a store that are read at a time, as each takes a round trip or more."""

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
# Scripts without spaces count a word a character; a run of 40 characters without a space counts as
# a word too, so that no single "word" can be longer than a passage.
LONGEST = 40
_WORD = re.compile(rf"[぀-ヿ㐀-䶿一-鿿]|[^\s぀-ヿ㐀-䶿一-鿿]{{1,{LONGEST}}}")
_SURROGATE = re.compile("[\ud800-\udfff]")
_ROW = (
    'not a JSON object such as {"text": "...", "id": "a", "title": "A", "metadata": {}}, of which '
    'only "text" is needed.'
)


@dataclass(frozen=True, slots=True)
class Document:
    """One text before it is split.

    Attributes:
        text: the whole text, its lines ending in nothing but a line feed.
        id: the id that a JSONL line states, else the file's label (``label:line`` for JSONL).
        title: what a JSONL line, the file itself or a markdown file's front matter states, an
            e-mail's subject, the first heading, the title of the first slide, a PDF file's first
            line, or the stem of the file's name.
        named: whether `id` was stated by the line itself and should survive as it is.
        metadata: ``source`` (the file's label), a JSONL line's other keys, those of front matter
            that is not part of the text (YAML's values as text), an e-mail's ``from``, ``to``,
            ``cc`` and ``date``, an Office file's ``author`` and ``modified``, and a book's
            ``author``, ``language`` and ``date``. Where the line has a ``source`` of its own, the
            label is ``passage_source``.
        pages: of a PDF file, the character at which each page begins.
    """

    text: str
    id: str
    title: str | None = None
    named: bool = False
    metadata: Mapping[str, Any] = field(default_factory=dict)
    pages: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Skipped:
    """A file, folder, line (``label:number``) or part of a file that was left out, and why.

    It is a problem where it should have been read and could not be: damaged, in another encoding,
    or in need of a package. The others were never meant, such as pictures.

    Attributes:
        label: names the file, and the line.
        reason: why, and what to do.
        problem: whether it should have been read.
        partial: whether it is a part of a file whose other parts were read, such as pages.
        environment: whether the reason is not in the file, as a missing package or a permission, so
            that the file may be readable later as it is.
    """

    label: str
    reason: str
    problem: bool = False
    partial: bool = False
    environment: bool = False


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
        try:
            data = self._bytes()
        except OSError as error:
            return [Skipped(self.label, _reason(error), problem=True, environment=True)]
        return documents_of(data, self.label, PurePath(self.path))

    def _bytes(self) -> bytes:
        if self.options is None:
            return Path(self.path).read_bytes()
        import fsspec

        with _as_os_errors():
            system, path = fsspec.url_to_fs(self.path, **self.options)
            data: bytes = system.cat_file(path)
            return data


def load_documents(
    paths: str | Path | Iterable[str | Path],
    *,
    root: Path | None = None,
    strict: bool = True,
    storage_options: Mapping[str, Any] | None = None,
) -> Documents:
    """Read every document behind files, folders (with everything below) and patterns, each once.

    A JSONL file holds a document a line, an object with ``text`` (or ``page_content``), and
    optionally ``id`` (or ``_id``), ``title`` and ``metadata``; other keys join the metadata. Other
    files of `SUFFIXES` are one document each; PDF files take `pypdf`, and Office files, HTML and
    EPUB the extra ``formats``. Text files are UTF-8, or UTF-16 or UTF-32 with a byte order mark.

    Below a folder and behind a pattern, hidden entries, other types, empty files and linked folders
    are left out. Files come in the order given, and sorted by name below a folder.

    Args:
        paths: one or several, such as ``"notes.md"``, ``"docs/"`` or ``"docs/**/*.txt"``; ``~`` is
            understood.
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
    names = path_names(paths)
    found = list(found_files(names, root=root, storage_options=storage_options))
    documents: list[Document] = []
    skipped: list[Skipped] = []
    with closing(read_all(one for one in found if isinstance(one, DocumentFile))) as contents:
        for file in found:
            for one in [file] if isinstance(file, Skipped) else next(contents):
                if isinstance(one, Document):
                    documents.append(one)
                elif one.problem and strict:
                    raise DocumentError(f"{one.label}: {one.reason}")
                else:
                    skipped.append(one)
    if not documents:
        raise no_text(names, skipped)
    return Documents(tuple(documents), tuple(skipped))


def read_all(files: Iterable[DocumentFile]) -> Generator[list[Document | Skipped]]:
    """What files hold, in order; those of a store are read together, as each takes round trips."""
    listed = list(files)
    distant = [one for one in listed if one.options is not None]
    pool = ThreadPoolExecutor(READERS, "rag-windows-documents")
    try:
        arriving = pool.map(DocumentFile.read, distant)
        for one in listed:
            yield one.read() if one.options is None else next(arriving)
    finally:
        pool.shutdown(cancel_futures=True)


def no_text(names: Iterable[str], skipped: Iterable[Skipped]) -> DocumentError:
    """The error of paths behind which there is no text at all."""
    ordered = sorted(skipped, key=lambda one: not one.problem)
    examples = ", ".join(f"{one.label}: {one.reason}" for one in ordered[:3])
    left_out = f" ({len(ordered)} left out: {examples})" if ordered else ""
    return DocumentError(
        f"No text found in {', '.join(names) or 'nothing'}{left_out}. Name {_KINDS} files that "
        "hold text, or a folder of them."
    )


def path_names(paths: str | Path | Iterable[str | Path]) -> list[str]:
    """One path or several, as strings.

    Raises:
        InputError: it is neither.
    """
    try:
        return [os.fsdecode(one) for one in ([paths] if isinstance(paths, str | Path) else paths)]
    except TypeError as error:
        raise InputError(
            f"paths must be a string, a Path or a list of these, not {paths!r:.80}. Give files, "
            'folders or patterns, such as "docs/".'
        ) from error


def found_files(
    paths: str | Path | Iterable[str | Path],
    *,
    root: Path | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Iterator[DocumentFile | Skipped]:
    """The files that `load_documents` reads, each once and in order, and what it leaves out."""
    opened: set[str] = set()
    for name in path_names(paths):
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
            label = Path(os.path.relpath(refused.filename, root)).as_posix()
            yield Skipped(_encodable(label), _reason(refused), problem=True, environment=True)
        for path in sorted(paths) if top.is_dir() else [top]:
            label = _encodable(Path(os.path.relpath(path, root)).as_posix())
            explicit = named and path is top
            if _hidden(path, given):
                continue
            if not path.is_file():
                yield Skipped(label, "not a regular file", problem=explicit)
            else:
                file = DocumentFile(os.path.abspath(path), label)
                yield from _once(file, str(path.resolve()), explicit, opened)


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
    suffix = PurePath(file.path).suffix.lower()
    if suffix not in SUFFIXES and not named:
        yield Skipped(file.label, f"{_encodable(suffix) or 'such'} files are not read")
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


def documents_of(data: bytes, name: str, path: PurePath | None = None) -> list[Document | Skipped]:
    """A file's documents from its bytes, and what of it can't be used and why.

    Args:
        data: what the file holds.
        name: of the file, whose suffix says what it is; nothing of that name is opened.
        path: what the suffix and the title are taken from instead.
    """
    found: list[Document | Skipped] = []
    try:
        for one in _documents(data, name, PurePath(name) if path is None else path):
            if isinstance(one, Document) and not one.text.strip():
                found.append(Skipped(one.id, "no text"))
            elif isinstance(one, Document) and one.title is not None:
                found.append(replace(one, title=_encodable(one.title)))
            else:
                found.append(one)
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        advice = "it is damaged or cut short; write it again"
        if error.encoding.startswith("utf-8"):
            advice = "save it as UTF-8, for example: iconv -f ENCODING -t UTF-8 FILE"
        reason = f"not valid {error.encoding.upper()} (byte {error.start}); {advice}"
        found.append(Skipped(f"{name}:{line}", reason, problem=True))
    except (OSError, DocumentError, MissingExtraError) as error:
        around = not isinstance(error, DocumentError)
        found.append(Skipped(name, _reason(error), problem=True, environment=around))
    return found


def _documents(data: bytes, label: str, path: PurePath) -> Iterator[Document | Skipped]:
    """The documents of a file's bytes."""
    suffix, metadata = path.suffix.lower(), {"source": label}
    if data.startswith(b"%PDF-") or suffix == ".pdf":
        yield from _pdf(data, label, path.stem)
        return
    if suffix in FORMATS:
        yield from _converted(data, label, path)
        return
    text = _plain_lines(_decoded(data))
    if suffix in (".md", ".markdown"):
        yield _markdown(text, label, path.stem)
        return
    if suffix != ".jsonl":
        yield Document(text, label, path.stem, metadata=metadata)
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
            metadata=joined({**(row.model_extra or {}), **(row.metadata or {})}, metadata),
        )


class _Row(BaseModel, extra="allow", strict=True):
    """A line of a JSONL file."""

    text: str = Field(validation_alias=AliasChoices("text", "page_content"))
    id: str | int | None = Field(None, validation_alias=AliasChoices("id", "_id"))
    title: str | None = None
    metadata: dict[str, Any] | None = None


def joined(own: Mapping[str, Any], ours: Mapping[str, Any]) -> dict[str, Any]:
    """A document's own metadata and ours, which get another name where it has that one itself."""
    both = dict(own)
    for key, value in ours.items():
        while key in own:
            key = f"passage_{key}"
        both[key] = value
    return both


# UTF-32 first, as its mark begins like that of UTF-16.
_MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)


def _decoded(data: bytes) -> str:
    """The text of a file's bytes; a byte order mark says how they are encoded."""
    for mark, encoding in _MARKS:
        if data.startswith(mark):
            return data.decode(encoding)
    if b"\x00" in data:
        raise DocumentError(f"binary, not UTF-8 text; name {_KINDS} files")
    return data.decode("utf-8-sig")


def _plain_lines(text: str) -> str:
    return text.replace("\r\n", "\n").replace("\r", "\n")


def words_of(text: str) -> Iterator[re.Match[str]]:
    """Its words; a script that is written without spaces has one a character."""
    return _WORD.finditer(text)


def count_words(text: str) -> int:
    """How many words a text has."""
    return sum(1 for _ in words_of(text))


def _markdown(text: str, label: str, stem: str) -> Document:
    """The document of a Markdown file; front matter that is all metadata is none of its text."""
    front = front_matter(text)
    body, own = text[front.end :], front.others
    # Passages carry no longer title as a whole.
    if own is None or not body.strip() or count_words(front.title) > TITLE_WORDS:
        body, own = text, {}
    title, rest = (front.title, body) if front.title else _headed(body)
    return Document(rest, label, title or stem, metadata=joined(own, {"source": label}))


def _headed(text: str) -> tuple[str, str]:
    """The first heading as a title, and the text without it where it opens that.

    Every passage carries the title, so the opening heading need not stand in the first one again.
    """
    first = next(iter(structure_of(text).headings), None)
    if first is None:
        return "", text
    rest = text[first.end :]
    opens = not text[: first.start].strip() and bool(rest.strip())
    # What the title does not say, or passages don't carry as a whole, stays in the text.
    carried = first.plain and count_words(first.name) <= TITLE_WORDS
    return first.name, rest if opens and carried else text


def _converted(data: bytes, label: str, path: PurePath) -> Iterator[Document | Skipped]:
    """The document of a file of `FORMATS`, and what is not in it."""
    made = convert(data, path.suffix.lower(), lambda one: _plain_lines(_decoded(one)))
    for one in made.left_out:
        yield Skipped(label, _encodable(one.reason), problem=one.problem, partial=True)
    text = _encodable(_plain_lines(made.text))
    heading, rest = _headed(text) if made.headed else ("", text)
    stated = (_encodable(one or "").strip() for one in made.titles)
    title = next(filter(_is_title, filter(None, stated)), heading)
    yield Document(
        text=rest if title == heading else text,
        id=label,
        title=title or path.stem,
        metadata=joined(
            {key: _encodable(one) for key, one in made.metadata.items()}, {"source": label}
        ),
    )


_PAGE = "\n\n"
"""Between two pages."""

_BROKEN_PDF = (
    *(ArithmeticError, AttributeError, LookupError, OSError, RecursionError, TypeError, ValueError),
)
"""What pypdf raises for damaged files, besides errors of its own."""

_NO_TITLE = re.compile(
    r"untitled\b.*|microsoft \w+ - .*|(document|slide|page|presentation|powerpoint presentation)"
    r"[\W\d]*|.*\.(docx?|dvi|fm|indd|odt|pages|pdf|pptx?|ps|pub|qxd|rtf|tex|txt|xlsx?)",
    re.IGNORECASE | re.DOTALL,
)
"""What programs state as the title of a PDF file whose author stated none."""


class _Letters:
    """How large the letters of a page are: a function that pypdf calls for each piece of text."""

    def __init__(self) -> None:
        self._pieces: list[tuple[float, str]] = []
        self._place: object = None

    def __call__(
        self, text: str, outer: Sequence[float], inner: Sequence[float], font: object, size: float
    ) -> None:
        if text.strip():
            height = abs(size) * math.hypot(*inner[2:4]) * math.hypot(*outer[2:4])
            line, self._place = self._place, (inner[5], outer[5])
            self._pieces.append((round(height, 1), text if line == self._place else f"\n{text}"))

    def title(self, page: str) -> str:
        """The first text in the largest letters, else the first line, if they look like a title."""
        sizes: Counter[float] = Counter()
        for size, text in self._pieces:
            sizes[size] += len(text.strip())
        largest, ordinary = max(sizes, default=0.0), (sizes.most_common(1) or [(0.0, 0)])[0][0]
        if largest > 1.1 * ordinary:
            runs = itertools.groupby(self._pieces, key=lambda piece: piece[0] == largest)
            first = next(run for is_largest, run in runs if is_largest)
            headline = " ".join("".join(text for _, text in first).split())
            if _is_title(headline):
                return headline
        line, *others = (one.strip() for one in page.split("\n"))
        # A line as long as the others, which a small letter follows, is part of a sentence.
        longest = max(map(len, others), default=2 * len(line))
        ends = len(line) < 0.8 * longest and not "".join(others[:1])[:1].islower()
        return line if ends and _is_title(line) and line[-1] not in ".,;:" else ""


def _is_title(text: str) -> bool:
    named = sum(map(str.isalpha, text)) > 1 and not _NO_TITLE.fullmatch(text)
    return named and count_words(text) <= TITLE_WORDS


def _not_a_pdf(error: Exception) -> DocumentError:
    return DocumentError(
        f"not a PDF file that pypdf can read ({first_line(error)}); save it again as PDF"
    )


def _pdf(data: bytes, label: str, stem: str) -> Iterator[Document | Skipped]:
    """The document of a PDF file, and the pages that are not in it."""
    require("Reading PDF files", "pypdf", extra="pdf")
    from pypdf import PdfReader
    from pypdf.errors import DependencyError, FileNotDecryptedError, PyPdfError

    broken = (PyPdfError, *_BROKEN_PDF)
    texts: list[str] = []
    silent: list[int] = []
    damaged: dict[int, Exception] = {}
    title = ""
    try:
        reader = PdfReader(io.BytesIO(data))
        for number in range(1, len(reader.pages) + 1):
            texts.append("")
            try:
                page = reader.pages[number - 1]
                lines = _Letters()
                texts[-1] = _encodable(page.extract_text(visitor_text=lines)).strip()
                contents = None if texts[-1] else page.get_contents()
                if contents is not None and contents.get_data().strip():
                    silent.append(number)
            except FileNotDecryptedError:
                raise
            except broken as error:
                damaged[number] = error
            else:
                if texts[-1] and not any(texts[:-1]):
                    title = lines.title(texts[-1])
        stated = reader.metadata.title if reader.metadata else None
    except FileNotDecryptedError as error:
        raise DocumentError("it opens with a password only; save it without one") from error
    except DependencyError as error:
        raise MissingExtraError(f"{error}; install that with pip") from error
    except broken as error:
        raise _not_a_pdf(error) from error
    if damaged and not any(texts):
        raise _not_a_pdf(next(iter(damaged.values())))
    if not any(texts):
        raise DocumentError("its pages hold no text; scanned pages need OCR first")
    pages = len(texts)
    if damaged:
        first = first_line(next(iter(damaged.values())))
        which = numbered("page", [*damaged])
        reason = f"{which} of {pages} can't be read ({first}); save it again as PDF"
        yield Skipped(label, reason, problem=True, partial=True)
    if silent:
        reason = f"{numbered('page', silent)} of {pages} without text; scanned pages need OCR first"
        # A picture among texts is ordinary, and a text among pictures is not.
        yield Skipped(label, reason, problem=len(silent) > sum(map(bool, texts)), partial=True)
    named = _encodable(str(stated or "")).strip()
    starts = [0, *itertools.accumulate(len(one) + len(_PAGE) for one in texts if one)]
    shown = itertools.accumulate((bool(one) for one in texts), initial=0)
    yield Document(
        _PAGE.join(one for one in texts if one),
        label,
        (named if _is_title(named) else title) or stem,
        metadata={"source": label},
        pages=tuple(starts[count] for count, _ in zip(shown, texts, strict=False)),
    )


def _encodable(text: str) -> str:
    # Unpaired surrogates, which no encoder takes: JSON can spell them, and bytes of file names
    # that can't be decoded arrive as them.
    return _SURROGATE.sub("\ufffd", text)


def _reason(error: Exception) -> str:
    absent = isinstance(error, FileNotFoundError)
    return "no such file or folder" if absent else getattr(error, "strerror", None) or str(error)
