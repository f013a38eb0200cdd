"""The options that the evaluation's commands share."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import typer

from rag_windows.errors import InputError

RetrieverName = Literal["bm25", "dense", "hybrid", "gold"]
StyleName = Literal["plain", "chatrag"]


def numbers(given: Sequence[str], option: str = "--top-k", least: int = 1) -> tuple[int, ...]:
    """Whole numbers such as "5,10,20", each once and in rising order.

    Args:
        given: what stands behind the option, each time it is given.
        option: its name, for errors.
        least: the smallest number that makes sense.

    Raises:
        InputError: anything else.
    """
    value = ",".join(given)
    words = [word.strip() for word in value.split(",")]
    if not all(word.isascii() and word.isdecimal() and int(word) >= least for word in words):
        raise InputError(
            f"{option} {value!r} is no list of whole numbers from {least} on, such as 5,10,20."
        )
    found = [int(word) for word in words]
    if len(set(found)) < len(found):
        raise InputError(f"{option} {value!r} names a number twice.")
    return tuple(sorted(found))


Data = Annotated[
    Path, typer.Option("--data", metavar="FILE", help="The dataset's own file.", show_default=False)
]
Corpus = Annotated[
    Path | None,
    typer.Option(
        "--corpus",
        metavar="FILE",
        help="Passages to search: JSONL with id, title, text. Default: the evidence passages that "
        "the data file holds.",
        show_default=False,
    ),
]
Pool = Annotated[
    Literal["evidence"] | None,
    typer.Option(
        "--pool",
        help="Search the evidence passages of the data file; the same as no --corpus.",
        show_default=False,
    ),
]
Methods = Annotated[
    list[str],
    typer.Option(
        "--methods",
        metavar="NAME,...",
        help="What to compare, such as sequential,ape:temperature=0.8,deep-thinking+ape; see "
        "rag-windows methods.",
    ),
]
METHODS = ["sequential,pcw,ape"]
Retriever = Annotated[
    RetrieverName,
    typer.Option(
        "--retriever", help="How passages are found; gold reads the right ones and nothing else."
    ),
]
Embedder = Annotated[
    str | None,
    typer.Option(
        "--embedder",
        metavar="MODEL",
        help="For dense and hybrid: a sentence-transformers name or folder.",
        show_default=False,
    ),
]
TopK = Annotated[
    list[str],
    typer.Option(
        "--top-k", metavar="N,...", help="Passages to read; several numbers are compared."
    ),
]
Out = Annotated[
    Path | None,
    typer.Option(
        "--out",
        metavar="DIR",
        help="Folder of the run; the same command goes on where it stopped. Default: a folder "
        "below runs/, named by the settings.",
        show_default=False,
    ),
]
ShardOf = Annotated[
    str | None,
    typer.Option(
        "--shard",
        metavar="I/N",
        help="Answer only part I of N, for several machines; rag-windows eval merge joins them.",
        show_default=False,
    ),
]
Limit = Annotated[
    int | None,
    typer.Option(
        "--limit", min=1, metavar="N", help="Only the first N questions.", show_default=False
    ),
]
Seed = Annotated[
    int, typer.Option("--seed", min=0, metavar="N", help="Of everything that is drawn.")
]
MaxNewTokens = Annotated[
    int | None,
    typer.Option(
        "--max-new-tokens",
        min=1,
        metavar="N",
        help="Length of an answer at most. Default: the dataset's.",
        show_default=False,
    ),
]
System = Annotated[
    str | None,
    typer.Option(
        "--system",
        metavar="TEXT",
        help='Instruction before the passages; "" for none. Default: the dataset\'s.',
        show_default=False,
    ),
]
Style = Annotated[StyleName, typer.Option("--style", help="How a question is put to the model.")]
Evidence = Annotated[
    int,
    typer.Option(
        "--evidence",
        min=1,
        metavar="N",
        help="Passages that a prediction names as its evidence: those with most attention.",
    ),
]
Speed = Annotated[
    int,
    typer.Option(
        "--speed",
        min=0,
        metavar="N",
        help="Questions on which the first token is timed, cold and warm, in alternating rounds.",
    ),
]
Fresh = Annotated[
    bool, typer.Option("--fresh", help="Throw away what the folder holds and begin anew.")
]
CacheMemory = Annotated[
    str,
    typer.Option(
        "--cache-memory",
        metavar="SIZE",
        help='Memory for encoded windows, such as "8GiB" or a share of what is free. Nothing is '
        "kept on disk.",
    ),
]
RagTemperature = Annotated[
    float | None,
    typer.Option(
        "--rag-temperature",
        metavar="T",
        help="APE's temperature, for each method that has one.",
        show_default=False,
    ),
]
RagScale = Annotated[
    float | None,
    typer.Option(
        "--rag-scale",
        metavar="S",
        help="APE's scale, for each method that has one.",
        show_default=False,
    ),
]
Profile = Annotated[
    str | None,
    typer.Option(
        "--profile",
        metavar="FILE",
        help="What rag-windows calibrate found: the numbers of the method of that name.",
        show_default=False,
    ),
]
Predictions = Annotated[
    Path,
    typer.Option(
        "--predictions", metavar="FILE", help="Answers that are there.", show_default=False
    ),
]

MEMORY = "50%"
"""Of what is free when the model is loaded."""
