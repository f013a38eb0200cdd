"""Methods by name, as JSON and as a table, and their parameters."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import entry_points
from typing import Any

from rag_windows.errors import MethodError, did_you_mean
from rag_windows.methods.aligned import Aligned
from rag_windows.methods.ape import APE
from rag_windows.methods.auto import Auto
from rag_windows.methods.base import Method
from rag_windows.methods.codebook import Codebook
from rag_windows.methods.composed import Composed, chain
from rag_windows.methods.deep_thinking import DeepThinking
from rag_windows.methods.ensemble import ParallelEnsemble
from rag_windows.methods.linked import Linked
from rag_windows.methods.mateicl import MateICL
from rag_windows.methods.neighbours import Neighbours
from rag_windows.methods.pced import PCED
from rag_windows.methods.pcw import PCW
from rag_windows.methods.query_likelihood import QueryLikelihood
from rag_windows.methods.sequential import Sequential
from rag_windows.methods.sink import Sink
from rag_windows.methods.structured_prompting import StructuredPrompting

METHODS: Mapping[str, type[Method]] = {
    method.name: method
    for method in (
        APE,
        PCW,
        StructuredPrompting,
        MateICL,
        ParallelEnsemble,
        PCED,
        QueryLikelihood,
        DeepThinking,
        Codebook,
        Linked,
        Aligned,
        Neighbours,
        Sink,
        Sequential,
        Auto,
    )
}
"""The methods of this package, by the name that `resolve` and the command line take."""


def known_methods() -> Mapping[str, type[Method]]:
    """These, and those that installed distributions bring (entry points `rag_windows.methods`).

    Raises:
        MethodError: what an entry point names is no method of that name.
    """
    found = dict(METHODS)
    for entry in entry_points(group="rag_windows.methods"):
        kind = entry.load()
        if not (isinstance(kind, type) and issubclass(kind, Method) and kind.name == entry.name):
            raise MethodError(
                f"The entry point {entry.name!r} of the group rag_windows.methods, "
                f"{entry.value!r}, is not a Method whose name is {entry.name!r}. Correct it, or "
                "remove the distribution that brings it."
            )
        found.setdefault(entry.name, kind)
    return found


# A plus before a digit is a number's, as in 1e+3.
_PLUS = re.compile(r"\+(?!\d)")
# A comma before name= stands between parameters of one method.
_COMMA = re.compile(r",(?!\s*\w+\s*=)")


def resolve(method: str | Method | Mapping[str, Any]) -> Method:
    """Make a method of its name or of what `describe` wrote; a method comes back as it is.

    Parameters that are not named have their defaults: "ape" and "ape:temperature=0.8,scale=0.9".
    "a+b" is the method a on top of the method b, as "deep-thinking:steps=3+ape:scale=0.8". Without
    a b, parameters may be those of the reader that a has by itself, as "auto:retrieve=3".

    Raises:
        MethodError: the name or a parameter is unknown, a value is outside of its domain, the
            methods can't be combined, or the value is neither a name nor a method.
    """
    if isinstance(method, Method):
        return method
    described = _described(method) if isinstance(method, str) else method
    name = described.get("name") if isinstance(described, Mapping) else described
    named = str(name).lower()
    kinds = METHODS if named in METHODS else known_methods()
    if named not in kinds:
        within = "" if isinstance(method, str) and method.strip() == name else f" in {method!r}"
        advice = f"{did_you_mean(named, kinds)} Choose one of {sorted(kinds)}.".lstrip()
        raise MethodError(f"Unknown method {name!r}{within}. {advice}")
    kind = kinds[named]
    values = {name: _parameter(value) for name, value in described.items() if name != "name"}
    if "reader" in values and not issubclass(kind, Composed):
        raise MethodError(
            f"{method!r} is not a valid combination: {kind.name} reads windows itself and must "
            "stand last. Before a '+' use only "
            f"{sorted(name for name, one in known_methods().items() if issubclass(one, Composed))}."
        )
    own = {name: value for name, value in values.items() if name in _fields(kind)}
    if "reader" not in values and issubclass(kind, Composed):
        others = {name: value for name, value in values.items() if name not in own}
        return with_parameters(kind(**own), others)
    _check_names(kind.name, values, _fields(kind))
    return kind(**own)


def _described(text: str) -> dict[str, Any]:
    """The description that a text stands for."""
    described: dict[str, Any] = {}
    for part in reversed(_PLUS.split(text)):
        name, colon, settings = part.partition(":")
        one: dict[str, Any] = {"name": name.strip()}
        for setting in settings.split(",") if colon else ():
            key, equals, value = (piece.strip() for piece in setting.partition("="))
            if not equals or key in one or ":" in value or "=" in value:
                raise MethodError(
                    f"{setting.strip()!r} in {text!r} is not a parameter. Write each parameter "
                    "once as name=value, with commas between them, as in "
                    "ape:temperature=0.9,scale=0.9."
                )
            one[key] = _value(value)
        described = {**one, "reader": described} if described else one
    return described


def _value(text: str) -> Any:
    if text.lower() == "none":
        return None
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return text


def _parameter(value: Any) -> Any:
    """A parameter from JSON."""
    if isinstance(value, Mapping):
        return resolve(value)
    return tuple(map(_parameter, value)) if isinstance(value, list) else value


def spelled(method: Method) -> str:
    """A method as `resolve` and the command line take it, with what is not its default.

    Such as "ape:temperature=0.8" and "query-likelihood:retrieve=2+sequential". Of what no text
    stands for, such as a function or a list, it shows what Python does.
    """
    settings, reader = _changed(method), ""
    if isinstance(method, Composed):
        inner = method.reader
        own = next(one.default for one in dataclasses.fields(method) if one.name == "reader")
        within = _changed(inner, own) if _is_variation(inner, own) else None
        if within is None or within.keys() & {*_fields(method)}:
            reader = f"+{spelled(inner)}"
        else:
            settings |= within
    written = ",".join(f"{name}={value}" for name, value in settings.items())
    return f"{method.name}{':' if written else ''}{written}{reader}"


def _changed(method: Method, default: Any = None) -> dict[str, Any]:
    """Parameters, but the reader, that are not those of a default, or not their own."""
    found = {}
    for field in dataclasses.fields(method):
        value = getattr(method, field.name)
        usual = field.default if default is None else getattr(default, field.name)
        if field.name != "reader" and value != usual:
            found[field.name] = value
    return found


def _is_variation(method: Method, other: Any) -> bool:
    """Whether two methods differ in parameters of their own alone."""
    first, second = (getattr(one, "reader", None) for one in (method, other))
    return type(method) is type(other) and bool(first == second)


def names_in(text: str) -> list[str]:
    """The methods of a list: "pcw,ape:temperature=0.9,scale=0.8" names two."""
    return [name.strip() for name in _COMMA.split(text)]


def _check_names(method: str, given: Iterable[str], known: Sequence[str]) -> None:
    unknown = [name for name in given if name not in known]
    if not unknown:
        return
    having = [name for name, kind in known_methods().items() if unknown[0] in _fields(kind)]
    other = f", or choose a method that has it, such as {having[0]!r}" if having else ""
    advice = did_you_mean(unknown[0], known) or f"Leave it out{other}."
    raise MethodError(
        f"The method {method!r} has no parameter {unknown[0]!r} (it has "
        f"{', '.join(known) or 'none'}). {advice}"
    )


def _fields(method: Method | type[Method]) -> list[str]:
    return [field.name for field in dataclasses.fields(method)]


def with_parameters(method: Method, values: Mapping[str, Any]) -> Method:
    """The method with these values, each where it or the first reader inside has that parameter."""
    known = [name for one in chain(method) for name in _fields(one) if name != "reader"]
    _check_names(method.name, values, known)
    own = {name: value for name, value in values.items() if name in _fields(method)}
    if isinstance(method, Composed):
        inner = {name: value for name, value in values.items() if name not in own}
        own["reader"] = with_parameters(method.reader, inner)
    return dataclasses.replace(method, **own)


def numbers_of(method: Method) -> dict[str, float]:
    """Numeric parameters of a method and of the readers inside, as `with_parameters` sets them."""
    found: dict[str, float] = {}
    for one in chain(method):
        for name in _fields(one):
            value = getattr(one, name)
            if isinstance(value, int | float) and not isinstance(value, bool):
                found.setdefault(name, value)
    return found


def describe(method: Method) -> dict[str, Any]:
    """A method's name and parameters as JSON that `resolve` takes, but for functions' names."""
    return {"name": method.name} | {one: plain(getattr(method, one)) for one in _fields(method)}


def plain(value: Any) -> Any:
    """A parameter as JSON."""
    if value is None or isinstance(value, str | int | float | bool):
        return value
    if isinstance(value, Method):
        return describe(value)
    if isinstance(value, Sequence):
        return [plain(entry) for entry in value]
    return getattr(value, "__qualname__", None) or str(value)


def method_rows() -> list[dict[str, Any]]:
    """What users see of each method; the summary is the first line of its docstring."""
    return [
        {
            "name": name,
            "formula": kind.formula,
            "summary": (inspect.getdoc(kind) or "").partition("\n")[0].replace("``", ""),
            "parameters": {key: one for key, one in describe(kind()).items() if key != "name"},
            "paper": kind.paper,
        }
        for name, kind in known_methods().items()
    ]


def settings_of(row: Mapping[str, Any]) -> str:
    """The parameters of a row of `method_rows` in one line, as ``name=value``."""
    return ", ".join(
        f"{name}={value['name'] if isinstance(value, dict) else value}"
        for name, value in row["parameters"].items()
    )
