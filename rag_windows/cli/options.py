"""Options that several commands take, and how a command takes many of them as one dataclass."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
from collections.abc import Callable, Collection
from typing import Annotated, Any, Literal, get_origin, get_type_hints

import typer


def _device(value: str) -> str:
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", value):
        raise typer.BadParameter(f"{value!r} is none of auto, cpu, cuda and cuda:N")
    return value


def _link_tokens(value: str) -> int | float | str:
    if value == "all":
        return value
    try:
        if value.endswith("%"):
            return float(value[:-1]) / 100
        return int(value) if value.isdecimal() else float(value)
    except ValueError:
        raise typer.BadParameter(
            f"{value!r} is no number of tokens (16), share (0.15 or 15%) or all"
        ) from None


Docs = Annotated[
    list[str] | None,
    typer.Option(
        metavar="PATH",
        help="A file, a folder or a quoted pattern, repeated for each: .txt, .md, .pdf, or .jsonl "
        "with id, title, text. Default: the sample corpus.",
    ),
]
Strict = Annotated[
    bool, typer.Option("--strict", help="Stop where a file or a line of --docs can't be read.")
]
ReaderModel = Annotated[
    str | None,
    typer.Option(
        metavar="MODEL",
        envvar="RAG_WINDOWS_MODEL",
        help="A local folder or a name on the Hub. Default, without --docs: the shipped "
        "tiny-reader, which knows the sample corpus alone.",
    ),
]
Model = Annotated[
    str, typer.Option(metavar="MODEL", help="The shipped model, a local folder or a Hub name.")
]
MethodName = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="How windows are read, with numbers as in ape:temperature=0.9,scale=0.9; see "
        "rag-windows methods. Default: the profile's, else ape.",
    ),
]
ProfilePath = Annotated[
    str | None, typer.Option(metavar="FILE", help="A method's numbers, by rag-windows calibrate.")
]
RagTemperature = Annotated[
    float | None, typer.Option(metavar="T", help="The same as --method ape:temperature=T.")
]
RagScale = Annotated[
    float | None, typer.Option(metavar="S", help="The same as --method ape:scale=S.")
]
LinkTokens = Annotated[
    Any,
    typer.Option(
        parser=_link_tokens,
        metavar="K",
        help="Tokens of each window encoded in sight of the others: 16, 0.15, 15% or all.",
    ),
]
Fallback = Annotated[
    Literal["sequential"] | None,
    typer.Option(help="Read passages one after the other where windows are likely to lose."),
]
TopK = Annotated[int, typer.Option(min=1, metavar="N", help="Passages to retrieve.")]
PassageWords = Annotated[
    int, typer.Option(min=1, metavar="N", help="Length of a passage, about, in words.")
]
System = Annotated[
    str | None, typer.Option(metavar="TEXT", help="Instruction that stands before the passages.")
]
MaxNewTokens = Annotated[
    int, typer.Option(min=1, metavar="N", help="Length of the answer at most.")
]
MaxWindowTokens = Annotated[
    int | None,
    typer.Option(min=1, metavar="N", help="Cuts longer passages. Default: the model's room."),
]
Temperature = Annotated[
    float | None,
    typer.Option(
        min=0.0, metavar="T", help="Of sampling; 0 takes the likeliest. Default: the model's own."
    ),
]
Seed = Annotated[int | None, typer.Option(metavar="N", help="Makes sampling repeatable.")]
Device = Annotated[
    str, typer.Option(callback=_device, metavar="DEVICE", help="auto, cpu, cuda, or cuda:N.")
]
Dtype = Annotated[
    Literal["auto", "float32", "bfloat16", "float16"], typer.Option(help="Of the weights.")
]
CacheDir = Annotated[
    str | None,
    typer.Option(metavar="DIR", help="Of the passage cache. Default: the platform's cache folder."),
]
NoCache = Annotated[
    bool, typer.Option("--no-cache", help="Encode every passage anew, and keep nothing.")
]
Json = Annotated[bool, typer.Option("--json", help="JSON on stdout and nothing else.")]
Verbose = Annotated[
    bool, typer.Option("--verbose", help="Show the libraries' warnings, logs and progress bars.")
]

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
                    option = parameter.replace(name=field.name, annotation=hint)
                    taken.append(option.replace(default=field.default))

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
