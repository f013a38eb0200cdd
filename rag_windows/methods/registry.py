"""Methods by name, as JSON, as a table, and their numbers."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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

METHODS: MappingProxyType[str, type[Method]] = MappingProxyType(
    {
        method.name: method
        for method in (
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
    }
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
    built: Method | None = None
    for text in reversed(_PLUS.split(method)):
        name, colon, settings = text.partition(":")
        kind = METHODS.get(name.strip().lower())
        if kind is None:
            raise MethodError(
                f"Unknown method {name.strip()!r} in {method!r}; choose one of {sorted(METHODS)}."
            )
        values = _settings(kind, settings, method) if colon else {}
        if built is not None:
            if not issubclass(kind, Composed):
                wrappers = sorted(one for one in METHODS if issubclass(METHODS[one], Composed))
                raise MethodError(
                    f"{method!r}: {kind.name} reads windows by itself, so it stands last; before a "
                    f"'+' stand only {wrappers}."
                )
            values["reader"] = built
        try:
            built = kind(**values)
        except TypeError as error:
            raise MethodError(f"{method!r}: {error}") from error
    return built  # type: ignore[return-value]  # a split has a part at least


def _settings(kind: type[Method], settings: str, whole: str) -> dict[str, Any]:
    """Parameters written as name=value with commas between them."""
    known = [one for one in parameters(kind) if one != "reader"]
    values: dict[str, Any] = {}
    for setting in settings.split(","):
        key, equals, value = (one.strip() for one in setting.partition("="))
        if key not in known or not equals or key in values:
            there = f"it has {', '.join(known)}" if known else "it has none"
            raise MethodError(
                f"{setting.strip()!r} in {whole!r} sets no parameter of {kind.name}; {there}, each "
                f"written once as name=value, as in ape:temperature=0.9,scale=0.9."
            )
        values[key] = _value(value)
    return values


def _value(text: str) -> Any:
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return text


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


def parameters(method: Method | type[Method]) -> tuple[str, ...]:
    """Names of a method's own parameters, a reader inside it among them."""
    return tuple(field.name for field in dataclasses.fields(method))  # type: ignore[arg-type]  # every method is a dataclass; the abstract class is none


def known_parameters(method: Method) -> set[str]:
    """Names of what `with_known` sets: those of the method and of the readers inside it."""
    return {name for one in chain(method) for name in parameters(one)} - {"reader"}


def with_known(method: Method, values: Mapping[str, Any]) -> Method:
    """The method with these values, each wherever it or a reader inside it has that parameter.

    A name that none of them has changes nothing.

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
    readers = {name[7:]: value for name, value in numbers.items() if name.startswith("reader.")}
    if readers and isinstance(method, Composed):
        own["reader"] = with_numbers(method.reader, readers)
    return with_own(method, own)


def describe(method: Method) -> dict[str, Any]:
    """A method's name and numbers, and those of its reader, as JSON.

    Of a function only the name is left: `from_description` refuses it, instead of going on without.
    """
    return {
        "name": method.name,
        **{name: plain(getattr(method, name)) for name in parameters(method)},
    }


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
        shown = {
            key: value["name"] if isinstance(value, dict) else value
            for key, value in self.parameters.items()
        }
        return ", ".join(f"{key}={value}" for key, value in shown.items())


def method_rows() -> list[MethodRow]:
    """One row a method, in the order of the registry."""
    rows = []
    for name, kind in METHODS.items():
        numbers = {key: value for key, value in describe(kind()).items() if key != "name"}
        summary = (inspect.getdoc(kind) or "").partition("\n")[0].replace("``", "")
        rows.append(MethodRow(name, kind.formula, summary, numbers, kind.paper))
    return rows


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
