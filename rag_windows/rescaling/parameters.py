"""A method's parameters: which it has, and the same method with others."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from rag_windows.rescaling.base import Method
from rag_windows.rescaling.composed import Composed, chain


def parameters(method: Method | type[Method]) -> tuple[str, ...]:
    """Names of a method's own parameters, a reader inside it among them."""
    return tuple(field.name for field in dataclasses.fields(method))  # type: ignore[arg-type]  # every method is a dataclass; the abstract class is none


def known_parameters(method: Method) -> set[str]:
    """Names of what `with_known` sets: those of the method and of the readers inside it."""
    return {name for one in chain(method) for name in parameters(one)} - {"reader"}


def with_known(method: Method, values: Mapping[str, Any]) -> Method:
    """The method with these values, each wherever it or a reader inside it has that parameter.

    Args:
        method: to change.
        values: by the parameter's bare name; a name that none of them has changes nothing.

    Raises:
        MethodError: outside of a method's domain.
    """
    own = {name: value for name, value in values.items() if name in parameters(method)}
    if isinstance(method, Composed):
        own["reader"] = with_known(method.reader, values)
    return with_own(method, own)


def with_own(method: Method, values: Mapping[str, Any]) -> Method:
    """The method with other values of its own parameters.

    Raises:
        MethodError: outside of the method's domain.
        TypeError: it has no such parameter.
    """
    return dataclasses.replace(method, **values)  # type: ignore[type-var]  # every method is a dataclass


def numbers_of(method: Method) -> dict[str, float]:
    """Numeric parameters of a method; those of the reader inside it as ``reader.<name>``.

    Whole numbers are ints, booleans are no numbers.
    """
    found: dict[str, float] = {}
    for name in parameters(method):
        value = getattr(method, name)
        if isinstance(value, Method):
            found |= {f"{name}.{inner}": one for inner, one in numbers_of(value).items()}
        elif isinstance(value, int | float) and not isinstance(value, bool):
            found[name] = value
    return found


def with_numbers(method: Method, numbers: Mapping[str, float]) -> Method:
    """The method with other values of its numeric parameters, named as by `numbers_of`.

    Raises:
        MethodError: outside of the method's domain.
    """
    own: dict[str, Any] = {name: value for name, value in numbers.items() if "." not in name}
    inner: dict[str, dict[str, float]] = {}
    for name, value in numbers.items():
        if "." in name:
            field, _, rest = name.partition(".")
            inner.setdefault(field, {})[rest] = value
    for field, values in inner.items():
        own[field] = with_numbers(getattr(method, field), values)
    return with_own(method, own)
