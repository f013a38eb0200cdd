"""Records as JSON, and back."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

from rag_windows.evaluation.data.fields import Place, checked, optional, shown
from rag_windows.evaluation.record import ReadPassage, Record, Speed

Line = Record | Speed
"""What a line of a records.jsonl holds."""

_Read = Callable[[Any, str, Place], Any]


def line_of(value: Line) -> dict[str, Any]:
    """One line of a records.jsonl; JSON has no infinity: an impossible choice's score is null."""
    line = {"kind": type(value).__name__.lower(), **dataclasses.asdict(value)}
    if scores := line.get("scores"):
        line["scores"] = {key: None if one == -math.inf else one for key, one in scores.items()}
    return line


def read_line(line: Mapping[str, Any], place: Place) -> Line:
    """What `line_of` wrote.

    Raises:
        DataError: an unknown kind or field, a field that is missing or holds something else.
    """
    rest = dict(line)
    kind = rest.pop("kind", None)
    if kind == "record":
        return Record(**_fields(rest, Record, _RECORD, place))
    if kind == "speed":
        return Speed(**_fields(rest, Speed, _SPEED, place))
    raise place.error(
        f'"kind" is {shown(kind)}, and this version knows "record" and "speed"; use the '
        "rag-windows that wrote it."
    )


def _fields(
    line: Mapping[str, Any], kind: type, known: Mapping[str, _Read], place: Place
) -> dict[str, Any]:
    if unknown := sorted(set(line) - set(known)):
        raise place.error(
            f"the field {shown(unknown[0])} is unknown; use the rag-windows that wrote it."
        )
    for field in dataclasses.fields(kind):
        needed = field.default is field.default_factory is dataclasses.MISSING
        if needed and field.name not in line:
            raise place.error(f'"{field.name}" is missing.')
    return {name: known[name](value, name, place) for name, value in line.items()}


def _text(value: Any, name: str, place: Place) -> str:
    return checked(value, str, place, f'"{name}"')


def _maybe_text(value: Any, name: str, place: Place) -> str | None:
    return optional({name: value}, name, str, place)


def _count(value: Any, name: str, place: Place) -> int:
    return checked(value, int, place, f'"{name}"')


def _number(value: Any, name: str, place: Place) -> float:
    return float(checked(value, float, place, f'"{name}"'))


def _maybe_number(value: Any, name: str, place: Place) -> float | None:
    return None if value is None else _number(value, name, place)


def _list_of(read: _Read) -> _Read:
    def read_all(value: Any, name: str, place: Place) -> tuple[Any, ...]:
        found = checked(value, list, place, f'"{name}"')
        return tuple(read(one, f"{name}, entry {n}", place) for n, one in enumerate(found, 1))

    return read_all


def _span(value: Any, name: str, place: Place) -> tuple[int, int]:
    found = checked(value, list, place, f'"{name}"')
    if len(found) != 2:
        raise place.error(f'"{name}" must be two whole numbers, first character and end.')
    return _count(found[0], name, place), _count(found[1], name, place)


def _scores(value: Any, name: str, place: Place) -> dict[str, float]:
    found = checked(value, dict, place, f'"{name}"')
    return {
        key: -math.inf if one is None else _number(one, f"{name}, {key}", place)
        for key, one in found.items()
    }


def _passage(value: Any, name: str, place: Place) -> ReadPassage:
    found = checked(value, dict, place, f'"{name}"')
    return ReadPassage(**_fields(found, ReadPassage, _PASSAGE, place.at(name)))


_PASSAGE: Mapping[str, _Read] = {
    "text": _text,
    "id": _maybe_text,
    "title": _maybe_text,
    "score": _maybe_number,
    "mass": _maybe_number,
    "spans": _list_of(_span),
}
_RECORD: Mapping[str, _Read] = {
    "key": _text,
    "arm": _text,
    "answer": _text,
    "finish_reason": _text,
    "passages": _list_of(_passage),
    "left_out": _count,
    "prefix_mass": _maybe_number,
    "query_mass": _maybe_number,
    "prompt_tokens": _count,
    "cached_tokens": _count,
    "completion_tokens": _count,
    "windows_encoded": _count,
    "windows_reused": _count,
    "encode_s": _number,
    "ttft_s": _number,
    "total_s": _number,
    "scores": _scores,
    "notes": _list_of(_text),
    "error": _maybe_text,
}
_SPEED: Mapping[str, _Read] = {
    "key": _text,
    "arm": _text,
    "context_tokens": _count,
    "cold_s": _list_of(_number),
    "warm_s": _list_of(_number),
}
