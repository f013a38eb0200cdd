"""Files that are read strictly and written whole; problems are one line that names the place."""

from __future__ import annotations

import codecs
import functools
import hashlib
import json
import math
import os
import re
import secrets
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, cast

from pydantic import TypeAdapter, ValidationError

from rag_windows.errors import DataError

T = TypeVar("T")

_SHOWN = 80
_NAME = 100
_ODD = re.compile(r"[^A-Za-z0-9._@+=-]")
_WIDE = (codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE, codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
# A pair of surrogates; one alone (what the group holds); any other escape, so that the second
# backslash of an escaped one begins nothing.
_SURROGATES = re.compile(
    r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
    r"|(\\u[dD][89a-fA-F][0-9a-fA-F]{2})|\\.",
    re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class Place:
    """Where something stands: a file as the user named it, and what of it, such as "line 3"."""

    file: str
    record: str = ""

    def at(self, record: str) -> Place:
        """A place inside this one."""
        return replace(self, record=f"{self.record}, {record}" if self.record else record)

    def error(self, problem: str) -> DataError:
        """What to raise; the problem says what to do, and ends with a full stop."""
        where = f"{self.file}, {self.record}" if self.record else self.file
        return DataError(f"{where}: {problem}")


def shown(value: object) -> str:
    """A value of others in a message: control characters spelled out, long ones shortened."""
    text = repr(value[: _SHOWN + 1] if isinstance(value, str) else value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


def parse(text: str, place: Place, *, offset: int = 0) -> Any:
    r"""The value of a JSON text that means one thing.

    Half of a surrogate pair (``"\ud83d"``), which no tokenizer takes, becomes U+FFFD.

    Args:
        text: the text.
        place: of it, for messages.
        offset: bytes of the file before it.

    Raises:
        DataError: it is no JSON, is cut off or nested too deeply, holds NaN or an infinite number,
            or an object of it holds a key twice.
    """

    def unite(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) < len(pairs):
            key = Counter(key for key, _ in pairs).most_common(1)[0][0]
            raise place.error(f"the key {shown(key)} stands twice in one object; keep one.")
        return made

    def number(digits: str) -> float:
        value = float(digits)
        if not math.isfinite(value):
            raise place.error(f"{shown(digits)} is no number that JSON has; write a finite one.")
        return value

    if "\\ud" in text or "\\uD" in text:
        text = _SURROGATES.sub(lambda match: "\\ufffd" if match[1] else match[0], text)
    try:
        return json.loads(text, object_pairs_hook=unite, parse_constant=number, parse_float=number)
    except json.JSONDecodeError as error:
        # An escape of six characters is the longest thing that a cut leaves unread.
        cut = error.msg.startswith("Unterminated") or error.pos >= len(text.rstrip()) - 6
        byte = offset + len(text[: error.pos].encode()) + 1
        line = f"line {error.lineno}, " if not place.record else ""
        raise place.error(
            f"not valid JSON at {line}column {error.colno}, byte {byte} ({error.msg}); "
            + ("it may be cut off: fetch or write it again." if cut else "correct it there.")
        ) from error
    except RecursionError as error:
        raise place.error("lists and objects are nested too deeply; flatten them.") from error
    except ValueError as error:
        raise place.error(f"a whole number has too many digits ({error}).") from error


@functools.cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def validated(kind: type[T], value: Any, place: Place) -> T:
    """A parsed JSON value as a type that pydantic knows, without any conversion.

    Raises:
        DataError: it is something else; names the first field that is missing or wrong.
    """
    try:
        # As JSON again, in which tuples and dataclasses are lists and objects for strict models.
        found: T = _adapter(cast(Any, kind)).validate_json(json.dumps(value), strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        steps: list[str] = []
        for step in first["loc"]:
            if isinstance(step, str):
                steps.append(step if step.isidentifier() else shown(step))
            elif steps:
                steps[-1] += f" {step + 1}"
            else:
                steps.append(f"entry {step + 1}")
        where = place.at(", ".join(steps)) if steps else place
        raise where.error(f"{first['msg'].removeprefix('Value error, ').rstrip('.')}.") from error
    return found


class Keys:
    """Names of a file's records: their "id" where they have one, else their number from 1."""

    def __init__(self) -> None:
        self._places: dict[str, str] = {}

    def take(self, name: str | int | None, place: Place) -> str:
        """The name of the next record.

        Raises:
            DataError: another record has this name.
        """
        key = str(len(self._places) + 1 if name is None else name)
        if key in self._places:
            raise place.error(
                f'the "id" {shown(key)} stands in {self._places[key]} too; make it unique.'
                if name is not None
                else f'it has no "id", and {self._places[key]} has its number as "id"; give it one.'
            )
        self._places[key] = place.record
        return key


@dataclass(frozen=True, slots=True)
class Source:
    """A file that was read whole: its place, the digest of its bytes, and its text."""

    place: Place
    sha256: str
    text: str

    @property
    def stamp(self) -> dict[str, str]:
        """What a manifest keeps of it: its name without folders, and its digest."""
        return {"file": Path(self.place.file).name, "sha256": self.sha256}

    def json(self, kind: type[T]) -> T:
        """The value of the whole file; see `validated`."""
        return validated(kind, parse(self.text, self.place), self.place)

    def records(self, kind: type[T]) -> Iterator[tuple[Place, T]]:
        """The entries of a JSON list ("record 1", ...), or else of JSON lines ("line 1", ...)."""
        if self.text.lstrip()[:1] != "{":
            listed = validated(list[Any], parse(self.text, self.place), self.place)
            for number, value in enumerate(listed, start=1):
                place = self.place.at(f"record {number}")
                yield place, validated(kind, value, place)
            return
        offset = 0
        # Not splitlines: U+2028 and its like may stand inside a JSON string.
        for number, line in enumerate(self.text.split("\n"), start=1):
            if line.strip():
                place = self.place.at(f"line {number}")
                yield place, validated(kind, parse(line, place, offset=offset), place)
            offset += len(line.encode()) + 1


def read(path: str | Path) -> Source:
    """Read a UTF-8 file that holds something, of any size.

    Raises:
        DataError: it is missing, unreadable, empty or not UTF-8.
    """
    data = read_bytes(path)
    place = Place(str(path))
    text = decoded(data, place)
    if not text.strip():
        raise place.error("the file is empty; fetch or write it again.")
    return Source(place, hashlib.sha256(data).hexdigest(), text)


def read_bytes(path: str | Path) -> bytes:
    """The bytes of a file.

    Raises:
        DataError: it is missing or unreadable.
    """
    try:
        return Path(path).read_bytes()
    except (OSError, ValueError) as error:
        if isinstance(error, FileNotFoundError):
            problem = "there is no such file; check the path."
        elif isinstance(error, IsADirectoryError):
            problem = "this is a folder; name the file in it."
        else:
            reason = error.strerror if isinstance(error, OSError) else None
            problem = f"it can't be read ({reason or error}); check path, permissions and disk."
        raise Place(str(path)).error(problem) from error


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
        # Up to three of a character's four bytes may be left of one that was cut.
        cut = at >= len(data) - 3
        raise place.error(
            f"not UTF-8 at line {line}, byte {at + 1}; "
            + ("it may be cut off: fetch or write it again." if cut else "convert it to UTF-8.")
        ) from error


def write_whole(path: str | Path, text: str) -> None:
    """Write a text as UTF-8; a reader finds the old file or the new one, never a part.

    Args:
        path: of the file; its folder is made if it is missing.
        text: half surrogate pairs in it become U+FFFD.

    Raises:
        DataError: it can't be written.
    """
    target = Path(path)
    data = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        beside = target.with_name(f".{target.name}.{secrets.token_hex(8)}")
        try:
            with beside.open("xb") as stream:
                stream.write(data)
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(beside, target)
        except BaseException:
            beside.unlink(missing_ok=True)
            raise
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else None
        raise Place(str(path)).error(
            f"it can't be written ({reason or error}); check folder, permissions and free space."
        ) from error


def safe_name(name: str) -> str:
    """A file name for a name of others; different names give different file names.

    Letters, digits and ``._@+=-`` stay; where anything else stood, or the name is long or begins
    with a dot, a digest of the whole name is added.
    """
    plain = _ODD.sub("_", name)[:_NAME]
    if plain == name and not name.startswith(".") and name:
        return name
    digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:12]
    return f"{plain.lstrip('.')}-{digest}"


class JsonLines:
    """A file with a JSON object a line that is only ever added to.

    A process that is killed while it writes leaves at most one line without its end. Such a last
    line is dropped; anything else that is no JSON object is an error.

    Attributes:
        path: of the file, which need not exist.
        torn: bytes at its end that belong to no whole line; known once it was read to its end.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.torn = 0

    def __iter__(self) -> Iterator[tuple[Place, dict[str, Any]]]:
        """Place and value of each whole line.

        Raises:
            DataError: naming file and line.
        """
        self.torn = 0
        if not self.path.exists():
            return
        *whole, rest = read_bytes(self.path).split(b"\n")
        self.torn = len(rest)
        for number, line in enumerate(whole, start=1):
            place = Place(str(self.path), f"line {number}")
            try:
                value = validated(dict[str, Any], parse(decoded(line, place), place), place)
            except DataError as error:
                raise DataError(
                    f"{error} The file was changed by something else; take that line out, or begin "
                    "anew in another folder."
                ) from error
            yield place, value

    def repair(self) -> None:
        """Cut off a line without its end."""
        if self.path.exists():
            whole = read_bytes(self.path).rfind(b"\n") + 1
            if whole < self.path.stat().st_size:
                os.truncate(self.path, whole)

    def append(self, *values: Mapping[str, Any]) -> None:
        """Add lines, and wait until they are on the medium.

        Raises:
            DataError: they can't be written, or hold NaN or an infinite number, which could not be
                read again; the file is as it was.
        """
        if not values:
            return
        try:
            lines = [json.dumps(value, allow_nan=False) for value in values]
        except ValueError as error:
            raise DataError(
                f"{self.path} can't keep NaN or an infinite number: {error}. The model computes "
                "such numbers; load it in another dtype, such as float32."
            ) from error
        try:
            descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
            try:
                _append(descriptor, "".join(f"{line}\n" for line in lines).encode("ascii"))
            finally:
                os.close(descriptor)
        except OSError as error:
            raise DataError(
                f"{self.path} can't be written: {error.strerror}. What it holds already is kept; "
                "make room or give rights, and run the same command again to go on."
            ) from error


def _append(descriptor: int, data: bytes) -> None:
    """All of it, or on any failure, an interruption included, nothing."""
    before = os.fstat(descriptor).st_size
    try:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(descriptor, rest) :]
        os.fsync(descriptor)
    except BaseException:
        os.ftruncate(descriptor, before)
        raise
