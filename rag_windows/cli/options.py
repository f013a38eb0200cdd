"""Options that several commands take, and dataclasses of options as arguments of a command."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
from collections.abc import Callable, Collection
from typing import Annotated, Any, Literal, get_origin, get_type_hints

import typer

from rag_windows.visible_text import encodable


def option(metavar: str | None, text: str, **settings: Any) -> Any:
    """An option that takes a value; further arguments are those of `typer.Option`."""
    return typer.Option(metavar=metavar, help=text, **settings)


def flag(name: str, text: str) -> Any:
    """An option that takes none."""
    return typer.Option(name, help=text)


def count(text: str) -> Any:
    """An option that takes a number of something, at least one."""
    return typer.Option(min=1, metavar="N", help=text)


def _device(value: str) -> str:
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", value):
        raise typer.BadParameter(f"{value!r} must be one of auto, cpu, cuda and cuda:N")
    return value


def _link_tokens(value: str) -> int | float | str:
    try:
        if value.endswith("%"):
            share = float(value[:-1]) / 100
            return "all" if share == 1.0 else share
        return value if value == "all" else int(value) if value.isdecimal() else float(value)
    except ValueError:
        raise typer.BadParameter(
            f"{value!r} must be a number of tokens (16), a share (0.15 or 15%) or all"
        ) from None


_LINKED = (
    "Tokens of each window to encode again with the other windows in view: 16, 0.15, 15% or all."
)
_FOLDER = "Folder of the passage cache. Default: the platform's cache folder."
Model = Annotated[
    str, option("MODEL", "The shipped tiny-reader, a local folder or a name on the Hub.")
]
LinkTokens = Annotated[Any, option("K", _LINKED, parser=_link_tokens)]
LinkChoose = Annotated[
    Literal["first", "deviation", "query", "last"],
    option(
        None,
        "Which of them: the first, those whose keys change most, or those to which the question, "
        "or its last token, attends most.",
    ),
]
DEFAULT_PASSAGE_WORDS = 120
PassageWords = Annotated[
    int | None,
    count(
        f"Approximate length of a passage in words. Default: {DEFAULT_PASSAGE_WORDS}, and that of "
        "an index which exists."
    ),
]
Embedder = Annotated[
    str | None,
    option(
        "MODEL",
        "Find passages by meaning, too, with this model of sentence-transformers: a local folder "
        "or a name on the Hub.",
    ),
]
System = Annotated[
    str | None,
    option(
        "TEXT", "Instruction (system prompt) that is read before the passages.", parser=encodable
    ),
]
INSTRUCTION = (
    "Answer the question with a short phrase, using the documents. If no document answers it, say "
    "that it is not stated."
)
"""Is sent where the user gives none; benchmarks/results/instructions.md says what it does."""
Instruction = Annotated[
    str | None,
    option(
        "TEXT",
        'Instruction (system prompt) that is read before the passages; "" sends none. Default, '
        "behind the chat template's own system message and "
        f'but for the small models of this project, which were trained without: "{INSTRUCTION}"',
        parser=encodable,
    ),
]
MaxNewTokens = Annotated[int, count("Largest number of tokens of an answer.")]
Device = Annotated[
    str, option("DEVICE", "Device of the model: auto, cpu, cuda or cuda:N.", callback=_device)
]
CacheDir = Annotated[str | None, option("DIR", _FOLDER)]
Shared = Annotated[
    str | None,
    option("URL", "Store of passages that machines share: a folder, or s3://bucket/prefix."),
]
Strict = Annotated[bool, flag("--strict", "Stop with an error if a file can't be read.")]
TopK = Annotated[int, count("Number of passages to retrieve.")]
Json = Annotated[bool, flag("--json", "Print one JSON object and nothing else.")]
Verbose = Annotated[bool, flag("--verbose", "Show the libraries' warnings and logs.")]
_Command = Callable[..., None]


def spreading(*, without: Collection[str] = ()) -> Callable[[_Command], _Command]:
    """Let a command take dataclasses: each of their fields becomes an option in its place.

    A field that is annotated with no option keeps its default, and so do those `without` one.
    """

    def decorate(command: _Command) -> _Command:
        hints = get_type_hints(command, include_extras=True)
        taken: list[inspect.Parameter] = []
        owned: dict[str, list[str]] = {}
        for name, parameter in inspect.signature(command).parameters.items():
            if not dataclasses.is_dataclass(kind := hints[name]):
                taken.append(parameter.replace(annotation=kind))
                continue
            inside = get_type_hints(kind, include_extras=True)
            defaults = {field.name: field.default for field in dataclasses.fields(kind)}
            options = (one for one in defaults if get_origin(inside[one]) is Annotated)
            owned[name] = [one for one in options if one not in without]
            for one in owned[name]:
                spread = parameter.replace(name=one, annotation=inside[one])
                taken.append(spread.replace(default=defaults[one]))

        @functools.wraps(command)
        def run(**given: Any) -> None:
            for name, fields in owned.items():
                given[name] = hints[name](**{field: given.pop(field) for field in fields})
            command(**given)

        run.__annotations__ = {one.name: one.annotation for one in taken} | {"return": None}
        run.__signature__ = inspect.Signature(taken, return_annotation=None)  # type: ignore[attr-defined]  # what inspect looks at first
        return run

    return decorate
