"""Methods as plain JSON, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rag_windows.errors import MethodError
from rag_windows.rescaling.base import Method
from rag_windows.rescaling.parameters import parameters
from rag_windows.rescaling.registry import METHODS, resolve


def describe(method: Method) -> dict[str, Any]:
    """A method's name and numbers, and those of its reader, as JSON.

    Of a function only the name is left: `from_description` refuses it, instead of going on without.
    """
    numbers = {name: plain(getattr(method, name)) for name in parameters(method)}
    return {"name": method.name, **numbers}


def plain(value: Any) -> Any:
    """A parameter as JSON."""
    if value is None or isinstance(value, str | int | float | bool):
        return value
    if isinstance(value, Method):
        return describe(value)
    if isinstance(value, Sequence):
        return [plain(entry) for entry in value]
    return getattr(value, "__qualname__", None) or str(value)


def from_description(value: str | Method | Mapping[str, Any]) -> Method:
    """A method from its name, itself, or what `describe` made of it.

    Raises:
        MethodError: an unknown name, or numbers that it does not have.
    """
    if not isinstance(value, Mapping):
        return resolve(value)
    kind = METHODS.get(str(value.get("name")).lower())
    if kind is None:
        raise MethodError(f"{dict(value)!r} names no method of {sorted(METHODS)}.")
    numbers = {key: _parameter(entry) for key, entry in value.items() if key != "name"}
    try:
        return kind(**numbers)
    except TypeError as error:
        raise MethodError(f"{dict(value)!r} is no method of {sorted(METHODS)}: {error}") from error


def _parameter(value: Any) -> Any:
    if isinstance(value, Mapping):
        return from_description(value)
    return tuple(map(_parameter, value)) if isinstance(value, list) else value
