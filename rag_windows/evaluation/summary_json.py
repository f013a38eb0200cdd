"""The JSON form of a summary, checked entry by entry when it is read."""

from __future__ import annotations

import dataclasses
import json
import math
import types
from collections.abc import Mapping
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from rag_windows.evaluation.data.fields import Place, checked, field, shown
from rag_windows.evaluation.data.strict_json import parse as parse_json
from rag_windows.evaluation.summary import Summary

FORMAT = "rag-windows evaluation summary"
VERSION = 1

T = TypeVar("T")


def dump(summary: Summary) -> str:
    """The summary as JSON text; NaN is null."""
    data = {"format": FORMAT, "version": VERSION, **dataclasses.asdict(summary)}
    return json.dumps(_plain(data), indent=1, allow_nan=False) + "\n"


def parse(text: str, file: str = "scores.json") -> Summary:
    """The summary of a JSON text.

    Args:
        text: what `dump` gave.
        file: what to call it in messages.

    Raises:
        DataError: naming the entry that is missing or wrong.
    """
    place = Place(file)
    data = parse_json(text, place)
    if field(data, "format", str, place) != FORMAT:
        raise place.error("it is no summary of an evaluation; name the scores.json of a run.")
    if field(data, "version", int, place) != VERSION:
        raise place.error(
            f"it has version {data['version']} and this rag-windows reads version {VERSION}; "
            "summarise the run again."
        )
    return _object(Summary, data, place)


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return value


def _object(kind: type[T], value: Any, place: Place) -> T:
    """A dataclass from an object that has an entry for each field."""
    data = checked(value, dict, place, "this")
    found = {}
    for name, hint in get_type_hints(kind).items():
        if name not in data:
            raise place.error(f'"{name}" is missing; summarise the run again.')
        found[name] = _read(hint, data[name], place.at(name))
    return kind(**found)


def _read(hint: Any, value: Any, place: Place) -> Any:
    """A value of one of the types that a summary's fields have."""
    if hint is float:
        return math.nan if value is None else float(checked(value, float, place, "this"))
    if hint in (int, str):
        return checked(value, hint, place, "this")
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return _object(hint, value, place)
    kinds = get_args(hint)
    if get_origin(hint) in (Union, types.UnionType):
        (kind,) = (one for one in kinds if one is not type(None))
        return None if value is None else _read(kind, value, place)
    if get_origin(hint) is tuple:
        entries = checked(value, list, place, "this")
        return tuple(
            _read(kinds[0], one, place.at(f"entry {number}"))
            for number, one in enumerate(entries, start=1)
        )
    entries_by_name = checked(value, dict, place, "this")
    return {
        name: _read(kinds[1], one, place.at(shown(name))) for name, one in entries_by_name.items()
    }
