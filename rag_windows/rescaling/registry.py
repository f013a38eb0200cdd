"""Methods by name."""

from __future__ import annotations

import re
from functools import partial
from types import MappingProxyType
from typing import Any

from rag_windows.errors import MethodError
from rag_windows.rescaling.ape import APE
from rag_windows.rescaling.base import Method
from rag_windows.rescaling.codebook import Codebook
from rag_windows.rescaling.composed import Composed
from rag_windows.rescaling.deep_thinking import DeepThinking
from rag_windows.rescaling.ensemble import ParallelEnsemble
from rag_windows.rescaling.linked import Linked
from rag_windows.rescaling.mateicl import MateICL
from rag_windows.rescaling.parameters import parameters
from rag_windows.rescaling.pcw import PCW
from rag_windows.rescaling.sequential import Sequential
from rag_windows.rescaling.structured_prompting import StructuredPrompting

CLASSES: tuple[type[Method], ...] = (
    APE,
    PCW,
    StructuredPrompting,
    MateICL,
    ParallelEnsemble,
    DeepThinking,
    Codebook,
    Linked,
    Sequential,
)

METHODS: MappingProxyType[str, type[Method]] = MappingProxyType(
    {method.name: method for method in CLASSES}
)
"""Every method, by the name that `resolve` and the command line take."""

# A plus before a digit is a number's, as in 1e+3.
_PLUS = re.compile(r"\+(?!\d)")
_SETTING = re.compile(r"\s*\w+\s*=")
_WORDS = {"none": None, "true": True, "false": False}


def resolve(method: str | Method) -> Method:
    """Turn a name into a method; a method comes back as it is.

    Parameters that are not named have their defaults: "ape" and "ape:temperature=0.8,scale=0.9".
    "a+b" is the method a on top of the method b, as "deep-thinking:steps=3+ape:scale=0.8".

    Raises:
        MethodError: the name or a parameter is unknown, a value is outside of its domain, the
            methods can't be combined, or the value is neither a name nor a method.
    """
    if isinstance(method, Method):
        return method
    if not isinstance(method, str):
        raise MethodError(f"Unknown method {method!r}; choose one of {sorted(METHODS)}.")
    parts = [_part(text, method) for text in _PLUS.split(method)]
    kind, numbers = parts.pop()
    built = _made(partial(kind, **numbers), method)
    for kind, numbers in reversed(parts):
        if not issubclass(kind, Composed):
            wrappers = sorted(name for name, one in METHODS.items() if issubclass(one, Composed))
            raise MethodError(
                f"{method!r}: {kind.name} reads windows by itself, so it stands last; before a "
                f"'+' stand only {wrappers}."
            )
        built = _made(partial(kind, reader=built, **numbers), method)
    return built


def names_in(text: str) -> list[str]:
    """The methods of a list with commas between them; commas stand between parameters, too.

    "pcw,ape:temperature=0.9,scale=0.8" names two.
    """
    names: list[str] = []
    for piece in text.split(","):
        if names and _SETTING.match(piece) and ":" in names[-1]:
            names[-1] += f",{piece}"
        else:
            names.append(piece)
    return [name.strip() for name in names]


def _part(text: str, whole: str) -> tuple[type[Method], dict[str, Any]]:
    """A method's class and those of its parameters that are given."""
    name, colon, settings = text.partition(":")
    kind = _kind(name.strip().lower(), whole)
    if not colon:
        return kind, {}
    known = [one for one in parameters(kind) if one != "reader"]
    numbers: dict[str, Any] = {}
    for setting in settings.split(","):
        key, equals, value = (one.strip() for one in setting.partition("="))
        if key not in known or not equals or key in numbers:
            there = f"it has {', '.join(known)}" if known else "it has none"
            raise MethodError(
                f"{setting.strip()!r} in {whole!r} sets no parameter of {kind.name}; {there}, each "
                f"written once as name=value, as in ape:temperature=0.9,scale=0.9."
            )
        numbers[key] = _value(value)
    return kind, numbers


def _value(text: str) -> Any:
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return text


def _made(make: partial[Method], whole: str) -> Method:
    try:
        return make()
    except TypeError as error:
        raise MethodError(f"{whole!r}: {error}") from error


def _kind(name: str, whole: str) -> type[Method]:
    if name in METHODS:
        return METHODS[name]
    raise MethodError(
        f"Unknown method {name!r}{'' if name == whole.lower() else f' in {whole!r}'}; choose one "
        f"of {sorted(METHODS)}."
    )
