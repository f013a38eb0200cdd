"""JSON, one value a line, only ever added to: what a killed run leaves behind stays readable."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rag_windows.errors import DataError
from rag_windows.evaluation.data.fields import Place
from rag_windows.evaluation.data.strict_json import parse


class JsonLines:
    """A file with a JSON object a line.

    A process that is killed while it writes leaves at most one line without its end. Such a last
    line is dropped; anything else that is no JSON object, as `strict_json` reads it, is an error.

    Attributes:
        path: of the file, which need not exist.
        torn: bytes at its end that belong to no whole line; known once it was read to its end.

    Args:
        path: see above.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.torn = 0

    def __iter__(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Number, from 1, and value of each whole line.

        Raises:
            DataError: naming file and line.
        """
        self.torn = 0
        try:
            with self.path.open("rb") as file:
                for number, line in enumerate(file, start=1):
                    if not line.endswith(b"\n"):
                        self.torn = len(line)
                        return
                    yield number, self._value(number, line)
        except FileNotFoundError:
            return
        except OSError as error:
            raise DataError(f"{self.path} can't be read: {error.strerror}.") from error

    def repair(self) -> int:
        """Cut off a line without its end; returns the bytes that are gone."""
        try:
            with self.path.open("r+b") as file:
                size = file.seek(0, os.SEEK_END)
                whole = _whole(file, size)
                if whole < size:
                    file.truncate(whole)
                return size - whole
        except FileNotFoundError:
            return 0
        except OSError as error:
            raise DataError(f"{self.path} can't be repaired: {error.strerror}.") from error

    def append(self, *values: Mapping[str, Any]) -> None:
        """Add lines, and wait until they are on the medium.

        Raises:
            DataError: they can't be written, or hold NaN or an infinite number, which could not be
                read again; the file is as it was.
        """
        if not values:
            return
        try:
            made = [json.dumps(value, allow_nan=False) for value in values]
        except ValueError as error:
            raise DataError(
                f"{self.path} can't keep NaN or an infinite number: {error}. The model computes "
                "such numbers; load it in another dtype, such as float32."
            ) from error
        data = "".join(f"{line}\n" for line in made).encode("ascii")
        try:
            descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
            try:
                _write(descriptor, data)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise DataError(
                f"{self.path} can't be written: {error.strerror}. What it holds already is kept; "
                "make room or give rights, and run the same command again to go on."
            ) from error

    def _value(self, number: int, line: bytes) -> dict[str, Any]:
        place = Place(str(self.path), f"line {number}")
        try:
            value = parse(line.decode("utf-8"), place)
        except (UnicodeDecodeError, DataError) as error:
            told = error if isinstance(error, DataError) else place.error(f"no UTF-8 ({error}).")
            raise DataError(
                f"{told} The file was changed by something else; take that line out, or begin anew "
                "in another folder."
            ) from error
        if not isinstance(value, dict):
            raise DataError(
                f"{self.path}, line {number}, must be a JSON object, not {type(value).__name__}."
            )
        return value


def _write(descriptor: int, data: bytes) -> None:
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


def _whole(file: Any, size: int) -> int:
    """Bytes up to the end of the last whole line."""
    end = size
    while end:
        start = max(0, end - (1 << 16))
        file.seek(start)
        found = file.read(end - start).rfind(b"\n")
        if found >= 0:
            return int(start + found + 1)
        end = start
    return 0
