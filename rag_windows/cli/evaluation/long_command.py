"""The command `rag-windows eval long` and its options."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from rag_windows.cli import options
from rag_windows.cli.evaluation import options as own
from rag_windows.cli.evaluation.asking import Asking, Reading, ask
from rag_windows.cli.options import spreading
from rag_windows.errors import InputError

Task = Annotated[
    Path | None,
    typer.Option(
        "--task",
        metavar="FILE",
        help='JSONL with "question", "answer" and "needle". Default: questions made here.',
        show_default=False,
    ),
]
Haystack = Annotated[
    Path | None,
    typer.Option(
        "--haystack",
        metavar="DIR",
        help="Texts to hide the needles in. Default: the file's own, or the sample corpus.",
        show_default=False,
    ),
]
Sizes = Annotated[
    list[str],
    typer.Option("--passages", metavar="N,...", help="How many there are, the needle's included."),
]
Positions = Annotated[
    list[str],
    typer.Option(
        "--positions", metavar="X,...", help="Where the needle stands, from 0 (first) to 1 (last)."
    ),
]
Questions = Annotated[
    int | None,
    typer.Option(
        "--questions",
        min=1,
        metavar="N",
        help="In each cell, the same ones. Default: all of a file, else 10.",
        show_default=False,
    ),
]

SIZES = ["1,4,16,64"]
POSITIONS = ["0,0.5,1"]


@spreading(without=("limit",))
def long(
    *,
    task: Task = None,
    haystack: Haystack = None,
    passages: Sizes = SIZES,
    positions: Positions = POSITIONS,
    questions: Questions = None,
    passage_words: options.PassageWords = 100,
    model: options.Model = "tiny-reader",
    methods: own.Methods = own.METHODS,
    asking: Asking,
    speed: own.Speed = 8,
    reading: Reading,
) -> None:
    """A needle among more and more passages, first, in the middle and last."""
    from rag_windows.cli.evaluation.running import Search
    from rag_windows.cli.evaluation.source import Source

    chosen = {
        "haystack": None if haystack is None else str(haystack),
        "sizes": own.numbers(passages, "--passages"),
        "depths": shares(positions),
        "questions": questions,
        "seed": asking.seed,
        "passage_words": passage_words,
    }
    source = Source("long", None if task is None else str(task), None, chosen)
    ask(source, Search("given", None), model, methods, (None,), asking, reading, speed=speed)


def shares(given: Sequence[str]) -> tuple[float, ...]:
    """Numbers from 0 to 1, such as "0,0.5,1"; the sweep checks their range.

    Raises:
        InputError: something else.
    """
    value = ",".join(given)
    try:
        return tuple(float(word) for word in value.split(","))
    except ValueError:
        raise InputError(
            f"--positions {value!r} is no list of numbers from 0 to 1, such as 0,0.5,1."
        ) from None
