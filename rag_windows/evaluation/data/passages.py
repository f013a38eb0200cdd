"""A file of passages to search: lines of JSON, or tab-separated values as in DPR and INSCIT."""

from __future__ import annotations

import gzip
import hashlib
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rag_windows.evaluation.data.fields import Place, checked, field, optional, shown
from rag_windows.evaluation.data.reading import unreadable
from rag_windows.evaluation.data.strict_json import parse
from rag_windows.passage import Passage

TITLES = " - "
"""Between a page's title and those of its sections."""

_MARK = b"\xef\xbb\xbf"
_GZIP = b"\x1f\x8b"
_HEADER = ("id", "text", "title")
_SECTION = "[SEP]"
_QUOTED = re.compile(r'"((?:[^"]|"")*)"')


@dataclass(frozen=True, slots=True)
class Corpus:
    """Passages with different ids.

    Attributes:
        passages: in the order of the file.
        stamp: the file's name and digest, for a manifest.
    """

    passages: tuple[Passage, ...]
    stamp: dict[str, str]


def read_corpus(path: str | Path) -> Corpus:
    """Read a passages file, line by line.

    Either every line is a JSON object ``{"id": ..., "text": ..., "title": ...}``, the title being
    optional; or every line has an id, a text and optionally a title with a tab between them, fields
    quoted as in CSV or not, where lines ``id, text, title`` are headers (INSCIT's own script writes
    several). " [SEP] " between titles becomes " - ", so that a passage reads alike from here and
    from INSCIT's data file. The file may be compressed by gzip.

    Raises:
        DataError: the file is missing, unreadable, empty, cut off (if compressed), not UTF-8; a
            line is of neither form; or an id stands twice. File and line are named.
    """
    place = Place(str(path))
    passages: list[Passage] = []
    lines: dict[str, int] = {}
    for number, line in _lines(Path(path), place):
        where = place.at(f"line {number}")
        one = _from_json(line, where) if line.lstrip()[:1] == "{" else _from_row(line, where)
        if one is None:
            continue
        name = str(one.id)
        if name in lines:
            raise where.error(
                f"the id {shown(name)} stands in line {lines[name]} already; "
                "give each passage an id of its own."
            )
        lines[name] = number
        passages.append(one)
    if not passages:
        raise place.error("there is no passage in it; fetch or write it again.")
    return Corpus(tuple(passages), {"file": Path(path).name, "sha256": _digest(path)})


def _lines(path: Path, place: Place) -> Iterator[tuple[int, str]]:
    """Lines that are not blank, with their numbers."""
    try:
        with path.open("rb") as plain:
            packed = plain.read(len(_GZIP)) == _GZIP
            plain.seek(0)
            stream: Any = gzip.GzipFile(fileobj=plain) if packed else plain
            for number, data in enumerate(stream, start=1):
                line = data.removeprefix(_MARK) if number == 1 else data
                try:
                    text = line.decode().rstrip("\r\n")
                except UnicodeDecodeError as error:
                    raise place.at(f"line {number}").error(
                        f"not UTF-8 at byte {error.start + 1} of the line; "
                        "convert the file to UTF-8."
                    ) from error
                if text.strip():
                    yield number, text
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise place.error(f"the compressed file is damaged or cut off ({error}).") from error
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from error


def _digest(path: str | Path) -> str:
    try:
        with Path(path).open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise unreadable(path, error) from error


def _from_json(line: str, place: Place) -> Passage:
    record = parse(line, place)
    name = record.get("id") if isinstance(record, dict) else None
    if isinstance(name, int) and not isinstance(name, bool):
        record["id"] = str(name)
    return Passage(
        field(record, "text", str, place),
        _named(field(record, "id", str, place), place),
        optional(record, "title", str, place),
    )


def _from_row(line: str, place: Place) -> Passage | None:
    columns = line.split("\t")
    if not 2 <= len(columns) <= 3:
        raise place.error(
            f"{len(columns)} column(s); a line is a JSON object, or id, text and title with a tab "
            "between them."
        )
    name, text, title = (_unquoted(one) for one in (*columns, "")[:3])
    if (name, text, title) in (_HEADER, (*_HEADER[:2], "")):
        return None
    return Passage(text, _named(name, place), _sections(title) or None)


def _sections(title: str) -> str:
    first, *rest = title.split(_SECTION)
    if not rest:
        return title
    return TITLES.join([first.rstrip(), *(one.strip() for one in rest[:-1]), rest[-1].lstrip()])


def _named(name: str, place: Place) -> str:
    if not checked(name, str, place, '"id"'):
        raise place.error("the id is empty; give each passage an id of its own.")
    return name


def _unquoted(text: str) -> str:
    quoted = _QUOTED.fullmatch(text)
    return quoted[1].replace('""', '"') if quoted else text
