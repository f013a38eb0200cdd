"""Fields of a record, checked, with messages that say where they stand."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

from rag_windows.errors import DataError

T = TypeVar("T", str, int, float, list[Any], dict[str, Any])

_LONGEST = 80
_KINDS: tuple[tuple[type, str], ...] = (
    (bool, "true or false"),
    (str, "a string"),
    (int, "a whole number"),
    (float, "a number"),
    (list, "a list"),
    (dict, "an object"),
    (type(None), "null"),
)


@dataclass(frozen=True, slots=True)
class Place:
    """Where something stands.

    Attributes:
        file: as the user named it.
        record: what of it, such as "conversation 'a', turn 3"; empty for all of it.
    """

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
    text = repr(value[: _LONGEST + 1] if isinstance(value, str) else value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def kind_of(value: object) -> str:
    """What JSON calls a value, in words."""
    return next((words for kind, words in _KINDS if isinstance(value, kind)), type(value).__name__)


def checked(value: Any, kind: type[T], place: Place, name: str) -> T:
    """The value, if it is of this kind; ``float`` takes whole numbers too, and nothing takes bools.

    Raises:
        DataError: it is of another kind, or for ``float`` beyond what a float holds.
    """
    kinds = (int, float) if kind is float else kind
    if isinstance(value, kinds) and not isinstance(value, bool):
        if kind is float and not _finite(value):
            raise place.error(f"{name} is too large for a number; write a smaller one.")
        return cast(T, value)
    wanted = next(words for one, words in _KINDS if one is kind)
    raise place.error(f"{name} must be {wanted}, not {kind_of(value)}.")


def _finite(value: Any) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # of a whole number with hundreds of digits
        return False


def record_of(value: Any, place: Place) -> dict[str, Any]:
    """The value, which must be an object.

    Raises:
        DataError: it is something else.
    """
    return checked(value, dict, place, "this")


def field(record: Any, name: str, kind: type[T], place: Place) -> T:
    """A field that must be there.

    Args:
        record: an object.
        name: of the field.
        kind: ``str``, ``int``, ``float``, ``list`` or ``dict``.
        place: of the record.

    Raises:
        DataError: the record is no object, or the field is missing or of another kind.
    """
    record = record_of(record, place)
    if name not in record:
        wanted = next(words for one, words in _KINDS if one is kind)
        raise place.error(f'"{name}" is missing; it must be {wanted}.')
    return checked(record[name], kind, place, f'"{name}"')


def optional(record: Any, name: str, kind: type[T], place: Place) -> T | None:
    """A field that may be missing or null.

    Raises:
        DataError: the record is no object, or the field is of another kind.
    """
    return None if record_of(record, place).get(name) is None else field(record, name, kind, place)


def entries(record: Any, name: str, what: str, place: Place) -> Iterator[tuple[Place, Any]]:
    """The entries of a list that must be there, with their places: "`what` 1", "`what` 2", ...

    Raises:
        DataError: see `field`.
    """
    for number, value in enumerate(field(record, name, list, place), start=1):
        yield place.at(f"{what} {number}"), value


def strings(record: Any, name: str, place: Place) -> list[str]:
    """A list of strings that must be there.

    Raises:
        DataError: see `field`; or an entry is no string.
    """
    found = field(record, name, list, place)
    return [
        checked(value, str, place, f'entry {number} of "{name}"')
        for number, value in enumerate(found, start=1)
    ]


def several(names: Sequence[str], most: int = 3) -> str:
    """The first of some names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
