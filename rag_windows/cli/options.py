"""The options that commands share."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

import typer

_DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?")


def _device(value: str) -> str:
    if not _DEVICE.fullmatch(value):
        raise typer.BadParameter(f"{value!r} is none of auto, cpu, cuda and cuda:N")
    return value


def link_tokens(value: str) -> int | float | str:
    """A number of tokens, a share, or "all"."""
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
        "--docs",
        metavar="PATH",
        help="A file, a folder or a quoted pattern, repeated for each: .txt, .md, .pdf, or .jsonl "
        "with id, title, text. Default: the sample corpus.",
        show_default=False,
    ),
]
Strict = Annotated[
    bool,
    typer.Option("--strict", help="Stop where a file or a line of --docs can't be read."),
]
ReaderModel = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="MODEL",
        envvar="RAG_WINDOWS_MODEL",
        help="A local folder or a name on the Hub. Default, without --docs: the shipped "
        "tiny-reader, which knows the sample corpus alone.",
        show_default=False,
    ),
]
Model = Annotated[
    str,
    typer.Option(
        "--model", metavar="MODEL", help="The shipped model, a local folder, or a name on the Hub."
    ),
]
MethodName = Annotated[
    str | None,
    typer.Option(
        "--method",
        metavar="NAME",
        help="How windows are read, with numbers as in ape:temperature=0.9,scale=0.9; see "
        "rag-windows methods. Default: the profile's, else ape.",
        show_default=False,
    ),
]
ProfilePath = Annotated[
    str | None,
    typer.Option(
        "--profile",
        metavar="FILE",
        help="What rag-windows calibrate found for this model: the method and its numbers.",
        show_default=False,
    ),
]
RagTemperature = Annotated[
    float | None,
    typer.Option(
        "--rag-temperature",
        help="APE's temperature T inside the windows; the same as --method ape:temperature=T.",
        metavar="T",
    ),
]
RagScale = Annotated[
    float | None,
    typer.Option(
        "--rag-scale",
        help="APE's scale S of the windows' weight; the same as --method ape:scale=S.",
        metavar="S",
    ),
]
LinkTokens = Annotated[
    Any,
    typer.Option(
        "--link-tokens",
        parser=link_tokens,
        metavar="K",
        help="Tokens of each window encoded in sight of the others: 16, 0.15, 15% or all.",
        show_default=False,
    ),
]
Fallback = Annotated[
    Literal["sequential"] | None,
    typer.Option(
        "--fallback",
        help="Read passages one after the other where windows are likely to lose, and say so.",
        show_default=False,
    ),
]
TopK = Annotated[int, typer.Option("--top-k", min=1, metavar="N", help="Passages to retrieve.")]
PassageWords = Annotated[
    int,
    typer.Option(
        "--passage-words", min=1, metavar="N", help="Length of a passage, about, in words."
    ),
]
System = Annotated[
    str | None,
    typer.Option("--system", metavar="TEXT", help="Instruction that stands before the passages."),
]
MaxNewTokens = Annotated[
    int, typer.Option("--max-new-tokens", min=1, metavar="N", help="Length of the answer at most.")
]
MaxWindowTokens = Annotated[
    int | None,
    typer.Option(
        "--max-window-tokens",
        min=1,
        metavar="N",
        help="Longer passages become several windows. Default: what the model allows.",
        show_default=False,
    ),
]
Temperature = Annotated[
    float | None,
    typer.Option(
        "--temperature",
        min=0.0,
        metavar="T",
        help="Sampling: above 0, tokens are drawn at random; 0 takes the likeliest. Default: the "
        "model's own setting.",
        show_default=False,
    ),
]
Seed = Annotated[int | None, typer.Option("--seed", metavar="N", help="Makes sampling repeatable.")]
Device = Annotated[
    str,
    typer.Option(
        "--device", callback=_device, metavar="DEVICE", help="auto, cpu, cuda, or cuda:N."
    ),
]
Dtype = Annotated[
    Literal["auto", "float32", "bfloat16", "float16"],
    typer.Option("--dtype", help="Precision of the weights; auto is the model's own."),
]
CacheDir = Annotated[
    str | None,
    typer.Option(
        "--cache-dir",
        metavar="DIR",
        help="Folder of the passage cache. Default: the platform's cache folder.",
        show_default=False,
    ),
]
NoCache = Annotated[
    bool, typer.Option("--no-cache", help="Encode every passage anew, and keep nothing.")
]
Json = Annotated[bool, typer.Option("--json", help="JSON on stdout and nothing else.")]
Markdown = Annotated[bool, typer.Option("--markdown", help="A Markdown table.")]
Verbose = Annotated[
    bool, typer.Option("--verbose", help="Show the libraries' warnings, logs and progress bars.")
]
