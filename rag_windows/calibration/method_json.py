"""A method in a profile, and on one line."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from rag_windows.errors import MethodError, ProfileError
from rag_windows.methods import METHODS, Method, describe, from_description


def method_to_json(method: Method) -> dict[str, Any]:
    """The method's description, once it is sure that it can be read back.

    Raises:
        ProfileError: the method is not one of ours, or a parameter is no plain data.
    """
    described = describe(method)
    try:
        kept = from_description(described) == method
    except MethodError:
        kept = False
    if not kept:
        raise ProfileError(
            f"A profile can't hold {method!r}: it takes the methods {sorted(METHODS)}, with "
            "numbers and text as parameters. Calibrate one of these."
        )
    return described


def method_from_json(value: Any) -> Method:
    """The method that `method_to_json` wrote.

    Raises:
        ProfileError: an unknown method or parameter, or a number outside the method's domain.
    """
    if not isinstance(value, Mapping):
        raise ProfileError(f"must be an object with a method's name and numbers, got {value!r}")
    try:
        return from_description(value)
    except MethodError as error:
        raise ProfileError(str(error).rstrip(".")) from error


def label(method: Method) -> str:
    """A method and its parameters on one line, such as ``ape(temperature=0.9, scale=0.8)``.

    Parameters that are no numbers are left out where they have their documented default, unless
    there are no others.
    """
    values = {
        field.name: (getattr(method, field.name), field.default)
        for field in dataclasses.fields(method)  # type: ignore[arg-type] # they are dataclasses
    }
    told = [name for name, (value, default) in values.items() if value != default or _number(value)]
    # A method that has no numbers is told by its words.
    shown = [f"{name}={_shown(values[name][0])}" for name in told or values]
    return f"{method.name}({', '.join(shown)})"


def _number(value: Any) -> bool:
    return isinstance(value, Method | int | float) and not isinstance(value, bool)


def _shown(value: Any) -> str:
    if isinstance(value, Method):
        return label(value)
    return f"{value:g}" if _number(value) else repr(value)
