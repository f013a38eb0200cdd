"""Methods by name, as JSON, as a table, and their numbers."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

from rag_windows.errors import MethodError
from rag_windows.methods.ape import APE
from rag_windows.methods.base import Method
from rag_windows.methods.codebook import Codebook
from rag_windows.methods.composed import Composed, chain
from rag_windows.methods.deep_thinking import DeepThinking
from rag_windows.methods.ensemble import ParallelEnsemble
from rag_windows.methods.linked import Linked
from rag_windows.methods.mateicl import MateICL
from rag_windows.methods.pcw import PCW
from rag_windows.methods.sequential import Sequential
from rag_windows.methods.structured_prompting import StructuredPrompting

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


@dataclass(frozen=True, slots=True)
class MethodRow:
    """What a user sees of a method.

    Attributes:
        name: as `resolve` takes it.
        formula: what it changes.
        summary: first line of its docstring, without markup.
        parameters: its parameters with their defaults, as JSON.
        paper: as the class names it.
    """

    name: str
    formula: str
    summary: str
    parameters: dict[str, Any]
    paper: str

    @property
    def papers(self) -> list[str]:
        """The papers' arXiv numbers."""
        return re.findall(r"arXiv:([\w.]+)", self.paper)

    @property
    def settings(self) -> str:
        """The parameters in one line, as ``name=value``; empty without any."""
        return ", ".join(f"{key}={_shown(value)}" for key, value in self.parameters.items())


def method_rows() -> list[MethodRow]:
    """One row a method, in the order of the registry."""
    return [_row(kind) for kind in METHODS.values()]


def markdown_table() -> str:
    """The rows as a Markdown table, papers as links."""
    lines = ["| method | what it is | formula | parameters | paper |", "|---|---|---|---|---|"]
    for row in method_rows():
        cells = (
            f"`{row.name}`",
            row.summary,
            f"`{row.formula}`",
            f"`{row.settings}`" if row.parameters else "-",
            ", ".join(f"[{paper}](https://arxiv.org/abs/{paper})" for paper in row.papers) or "-",
        )
        # A bar inside a cell would end it, in code as well.
        lines.append("| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def _row(kind: type[Method]) -> MethodRow:
    parameters = describe(kind())
    del parameters["name"]
    summary = (inspect.getdoc(kind) or "").partition("\n")[0].replace("``", "")
    return MethodRow(kind.name, kind.formula, summary, parameters, kind.paper)


def _shown(value: Any) -> str:
    return str(value["name"]) if isinstance(value, dict) else str(value)
