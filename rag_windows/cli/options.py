"""Options that several commands take, and how a command takes many of them as one dataclass."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
from collections.abc import Callable, Collection
from typing import Annotated, Any, Literal, get_origin, get_type_hints

import typer

from rag_windows.prompt.visible_text import encodable


def option(metavar: str | None, text: str, **settings: Any) -> Any:
    """An option that takes a value; further arguments are those of `typer.Option`."""
    return typer.Option(metavar=metavar, help=text, **settings)


def text_option(metavar: str, text: str) -> Any:
    """An option that takes any text; bytes that are no text are replaced."""
    return typer.Option(metavar=metavar, help=text, parser=encodable)


def flag(name: str, text: str) -> Any:
    """An option that takes none."""
    return typer.Option(name, help=text)


def count(text: str) -> Any:
    """An option that takes a number of something, at least one."""
    return typer.Option(min=1, metavar="N", help=text)


def _device(value: str) -> str:
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", value):
        raise typer.BadParameter(f"{value!r} is none of auto, cpu, cuda and cuda:N")
    return value


def _link_tokens(value: str) -> int | float | str:
    try:
        if value.endswith("%"):
            return float(value[:-1]) / 100
        return value if value == "all" else int(value) if value.isdecimal() else float(value)
    except ValueError:
        raise typer.BadParameter(
            f"{value!r} is no number of tokens (16), share (0.15 or 15%) or all"
        ) from None


_LINKED = "Tokens of each window encoded in sight of the others: 16, 0.15, 15% or all."
_MODEL = "The shipped model, a local folder or a name on the Hub."
_FOLDER = "Of the passage cache. Default: the platform's cache folder."

Model = Annotated[str, option("MODEL", _MODEL)]
LinkTokens = Annotated[Any, option("K", _LINKED, parser=_link_tokens)]
PassageWords = Annotated[int, count("Length of a passage, about, in words.")]
System = Annotated[str | None, text_option("TEXT", "Instruction that stands before the passages.")]
MaxNewTokens = Annotated[int, count("Length of the answer at most.")]
MaxWindowTokens = Annotated[int | None, count("Cuts longer passages. Default: the model's room.")]
Device = Annotated[str, option("DEVICE", "auto, cpu, cuda, or cuda:N.", callback=_device)]
Dtype = Annotated[
    Literal["auto", "float32", "bfloat16", "float16"], option(None, "Of the weights.")
]
CacheDir = Annotated[str | None, option("DIR", _FOLDER)]
Json = Annotated[bool, flag("--json", "JSON on stdout and nothing else.")]
Verbose = Annotated[bool, flag("--verbose", "Show the libraries' warnings, logs and bars.")]

_Command = Callable[..., None]


def spreading(*, without: Collection[str] = ()) -> Callable[[_Command], _Command]:
    """Let a command take dataclasses: each of their fields becomes an option in its place.

    The command line knows flat parameters only. A field that is annotated with no option keeps its
    default, and so do those named.

    Args:
        without: fields that are no options of this command.
    """

    def decorate(command: _Command) -> _Command:
        hints = get_type_hints(command, include_extras=True)
        groups: dict[str, Any] = {
            name: hint for name, hint in hints.items() if dataclasses.is_dataclass(hint)
        }
        owners: dict[str, str] = {}
        taken: list[inspect.Parameter] = []
        for name, parameter in inspect.signature(command).parameters.items():
            if name not in groups:
                taken.append(parameter.replace(annotation=hints[name]))
                continue
            inside = get_type_hints(groups[name], include_extras=True)
            for field in dataclasses.fields(groups[name]):
                hint = inside[field.name]
                if field.name not in without and get_origin(hint) is Annotated:
                    owners[field.name] = name
                    spread = parameter.replace(name=field.name, annotation=hint)
                    taken.append(spread.replace(default=field.default))

        @functools.wraps(command)
        def run(**given: Any) -> None:
            parts: dict[str, dict[str, Any]] = {name: {} for name in groups}
            for option, name in owners.items():
                parts[name][option] = given.pop(option)
            command(**given, **{name: groups[name](**part) for name, part in parts.items()})

        run.__annotations__ = {one.name: one.annotation for one in taken} | {"return": None}
        run.__signature__ = inspect.Signature(taken, return_annotation=None)  # type: ignore[attr-defined]  # what inspect looks at first
        return run

    return decorate
