"""A dataset's file, read whole; every problem is one line that names file and place.

There is no limit on size: a passage of a megabyte is legal data and read as it is. The engine
makes several windows of it.
"""

from __future__ import annotations

import codecs
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rag_windows.errors import DataError
from rag_windows.evaluation.data.fields import Place, checked
from rag_windows.evaluation.data.strict_json import parse

_WIDE = (codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE, codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
# A character is four bytes at most: three of them may be left of one that was cut.
_HALF = 3


@dataclass(frozen=True, slots=True)
class Source:
    """A file and what stands in it.

    Attributes:
        place: of the file.
        sha256: of its bytes, in hexadecimal digits.
        text: without a byte order mark.
    """

    place: Place
    sha256: str
    text: str

    @property
    def stamp(self) -> dict[str, str]:
        """What a manifest keeps of it: its name without folders, and its digest."""
        return {"file": Path(self.place.file).name, "sha256": self.sha256}

    def json(self) -> Any:
        """The value of the whole file.

        Raises:
            DataError: see `strict_json.parse`.
        """
        return parse(self.text, self.place)

    def json_lines(self) -> Iterator[tuple[Place, Any]]:
        """The value of each line that is not blank, with its place, "line 1" and so on.

        Raises:
            DataError: see `strict_json.parse`.
        """
        offset = 0
        # Not splitlines: U+2028 and its like may stand inside a JSON string.
        for number, line in enumerate(self.text.split("\n"), start=1):
            if line.strip():
                place = self.place.at(f"line {number}")
                yield place, parse(line, place, offset=offset)
            offset += len(line.encode()) + 1

    def records(self) -> Iterator[tuple[Place, Any]]:
        """The entries of a JSON list ("record 1", ...), or else the values of JSON lines.

        Raises:
            DataError: see `strict_json.parse`.
        """
        if self.text.lstrip()[:1] == "{":
            yield from self.json_lines()
            return
        listed = checked(self.json(), list, self.place, "the file's content")
        for number, value in enumerate(listed, start=1):
            yield self.place.at(f"record {number}"), value


def read(path: str | Path) -> Source:
    """Read a text file that holds something.

    Args:
        path: UTF-8, with or without a byte order mark.

    Raises:
        DataError: it is missing, unreadable, empty or not UTF-8.
    """
    data = read_bytes(path)
    digest = hashlib.sha256(data).hexdigest()
    place = Place(str(path))
    text = decoded(data, place)
    if not text.strip():
        raise place.error("the file is empty; fetch or write it again.")
    return Source(place, digest, text)


def read_text(path: str | Path) -> str:
    """The text of a UTF-8 file, which may be empty.

    Raises:
        DataError: it is missing, unreadable or not UTF-8.
    """
    return decoded(read_bytes(path), Place(str(path)))


def decoded(data: bytes, place: Place) -> str:
    """UTF-8 as text, without a byte order mark.

    Raises:
        DataError: it is something else.
    """
    start = len(codecs.BOM_UTF8) if data.startswith(codecs.BOM_UTF8) else 0
    if data.startswith(_WIDE):
        raise place.error("it is UTF-16 or UTF-32; convert it to UTF-8, for example with iconv.")
    try:
        return data[start:].decode()
    except UnicodeDecodeError as error:
        at = start + error.start
        line = data.count(b"\n", 0, at) + 1
        cut = at >= len(data) - _HALF
        raise place.error(
            f"not UTF-8 at line {line}, byte {at + 1}; "
            + ("it may be cut off: fetch or write it again." if cut else "convert it to UTF-8.")
        ) from error


def read_bytes(path: str | Path) -> bytes:
    """The bytes of a file.

    Raises:
        DataError: it is missing or unreadable.
    """
    try:
        return Path(path).read_bytes()
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from error


def unreadable(path: str | Path, error: Exception) -> DataError:
    """What to raise where a file can't be opened or read."""
    place = Place(str(path))
    if isinstance(error, FileNotFoundError):
        return place.error("there is no such file; check the path.")
    if isinstance(error, IsADirectoryError):
        return place.error("this is a folder; name the file in it.")
    if isinstance(error, NotADirectoryError):
        return place.error("a part of the path is a file; check the path.")
    if isinstance(error, PermissionError):
        return place.error("you may not read it; change its permissions.")
    reason = error.strerror if isinstance(error, OSError) else None
    return place.error(f"it can't be read ({reason or error}); check path and disk.")
