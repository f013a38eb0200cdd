"""Strict reading and atomic writing of files, and the versions and machine of a measurement.

Errors name the file and the place in it.
"""

from __future__ import annotations

import functools
import gzip
import hashlib
import json
import lzma
import os
import platform
import re
import secrets
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BeforeValidator, TypeAdapter, ValidationError

from rag_windows import __version__
from rag_windows.errors import DataError
from rag_windows.visible_text import encodable, strict_json, visible

T = TypeVar("T")

Name = Annotated[str, BeforeValidator(lambda one: str(one) if type(one) is int else one)]
"""An id or a label, which files may write as a whole number."""


def shown(value: object) -> str:
    """A foreign value in a message: control characters spelled out, long ones shortened."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


_adapter: Callable[[Any], TypeAdapter[Any]] = functools.cache(TypeAdapter)


def validated(kind: type[T], text: str, place: str) -> T:
    """Parse JSON as a type that pydantic knows; a `DataError` names the first wrong field.

    ``place`` is where the text stands, such as "dev.json, line 3".
    """
    try:
        found: T = _adapter(kind).validate_json(strict_json(text), strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        inside = "".join(
            f" {step + 1}" if isinstance(step, int) else f", {step}" for step in first["loc"]
        )
        inside = visible(f"record{inside}" if inside.startswith(" ") else inside[2:])
        where = f"{place}, {inside}" if inside else place
        problem = first["msg"].removeprefix("Value error, ").rstrip(".")
        raise DataError(f"{where}: {problem}.") from error
    except ValueError as error:
        raise DataError(f"{place}: Invalid JSON: {error}.") from error
    return found


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file that was read whole, and its name and digest for a manifest."""

    path: str | Path
    stamp: dict[str, str]
    text: str

    def json(self, kind: type[T]) -> T:
        """The value of the whole file; see `validated`."""
        return validated(kind, self.text, str(self.path))

    def lines(self) -> Iterator[tuple[str, str]]:
        """Place and text of the lines that are not blank."""
        # Not splitlines: U+2028 and its like may stand inside a JSON string.
        for number, line in enumerate(self.text.split("\n"), start=1):
            if line.strip():
                yield f"{self.path}, line {number}", line.rstrip("\r")

    def _is_one_object(self) -> bool:
        """Whether it is a JSON object over several lines."""
        if not self.text.lstrip().startswith("{") or "\n" not in self.text.strip():
            return False
        try:
            json.loads(self.text)
        except (ValueError, RecursionError):
            return False
        return True

    def records(self, kind: type[T]) -> Iterator[tuple[str, T]]:
        """Place and value of the entries of a JSON list, or of JSON lines."""
        if not self.text.strip():
            raise DataError(f"{self.path} is empty. Give a file with JSON lines, or a JSON list.")
        if self._is_one_object():
            yield str(self.path), self.json(kind)
        elif self.text.lstrip().startswith("{"):
            for place, line in self.lines():
                yield place, validated(kind, line, place)
        else:
            for number, value in enumerate(self.json(list[kind]), start=1):  # type: ignore[valid-type] # mypy knows no types in variables
                yield f"{self.path}, record {number}", value


def read(path: str | Path) -> SourceFile:
    """Read a UTF-8 file of any size, which gzip or xz may have compressed."""
    try:
        data = Path(path).read_bytes()
        stamp = {"file": Path(path).name, "sha256": hashlib.sha256(data).hexdigest()}
        if data.startswith(b"\x1f\x8b"):
            data = gzip.decompress(data)
        elif data.startswith(b"\xfd7zXZ\x00"):
            data = lzma.decompress(data)
        return SourceFile(path, stamp, data.decode("utf-8-sig"))
    except (OSError, ValueError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise DataError(
            f"{path} can't be read ({_reason(error)}). Check the path and its permissions."
        ) from error


def write_whole(path: str | Path, text: str) -> None:
    """Write UTF-8 text, and its folder, atomically: readers find the old file or the new one."""
    target = Path(path)
    unfinished = target.with_name(f".{target.name}.{secrets.token_hex(8)}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            with unfinished.open("xb") as stream:
                _write_safely(stream, encodable(text).encode())
            os.replace(unfinished, target)
        finally:
            unfinished.unlink(missing_ok=True)
    except OSError as error:
        raise DataError(
            f"{path} can't be written ({_reason(error)}). Check the folder, its permissions and "
            "the free space."
        ) from error


def _write_safely(stream: Any, data: bytes) -> None:
    """Write, and wait until the data is on disk."""
    stream.write(data)
    stream.flush()
    os.fsync(stream.fileno())


def _reason(error: Exception) -> object:
    return getattr(error, "strerror", None) or error


def read_lines(path: Path, kind: Any) -> Iterator[tuple[str, Any]]:
    """Place and value of each whole line of a file that is only added to, if it is there.

    A process that is stopped while it writes leaves at most one line without its end, which is
    left out; anything else that does not validate is an error.
    """
    if path.exists():
        # Bytes of a line without its end may be no text.
        for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
            place = f"{path}, line {number}"
            yield place, validated(kind, line.decode("utf-8", "replace"), place)


def cut_torn(path: Path) -> None:
    """Cut off a line without its end."""
    if path.exists():
        os.truncate(path, path.read_bytes().rfind(b"\n") + 1)


def add_lines(path: Path, values: Sequence[Mapping[str, Any]]) -> None:
    """Add one line for each JSON object, and wait until they are on disk."""
    if not values:
        return
    try:
        # NaN could not be read again.
        lines = [f"{json.dumps(value, allow_nan=False)}\n" for value in values]
        with path.open("ab") as stream:
            _write_safely(stream, "".join(lines).encode("ascii"))
    except (OSError, ValueError) as error:
        raise DataError(
            f"{path} can't be written ({_reason(error)}): make room, or load a model that "
            "computes NaN in float32. What it holds is kept, and the same command goes on."
        ) from error


def machine() -> str:
    """Processor with its number of cores, and the accelerator if there is one."""
    import torch

    described, names = Path("/proc/cpuinfo"), [platform.processor() or platform.machine()]
    if described.exists():
        text = described.read_text(encoding="utf-8", errors="replace")
        names = re.findall(r"^model name\s*:\s*(.*?)\s*$", text, re.MULTILINE) or names
    words = f"{len(names)} cores of {names[0] or 'an unknown processor'}"
    return words + (f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else "")


def surroundings() -> dict[str, str]:
    """Versions and machine, which may change figures though no setting changed."""
    versions = {name: metadata.version(name) for name in ("torch", "transformers")}
    return {"rag-windows": __version__, **versions, "machine": machine()}
