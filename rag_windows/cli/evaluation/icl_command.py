"""The command `rag-windows eval icl` and its options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from rag_windows.cli import options
from rag_windows.cli.classify import CalibrateWith, Labels, Template
from rag_windows.cli.evaluation import options as own
from rag_windows.cli.evaluation.asking import Asking, Reading, ask
from rag_windows.cli.options import spreading

Task = Annotated[
    str,
    typer.Option(
        "--task",
        metavar="FILE|NAME",
        help="A JSONL file, or sst2, sst5, trec, mr or agnews, which come from the Hub.",
        show_default=False,
    ),
]
Demos = Annotated[
    Path | None,
    typer.Option(
        "--demos",
        metavar="FILE",
        help="What may be shown, where the task's file does not hold it.",
        show_default=False,
    ),
]
Test = Annotated[
    Path | None,
    typer.Option(
        "--test", metavar="FILE", help="Texts of a named task, without the Hub.", show_default=False
    ),
]
Shots = Annotated[
    list[str],
    typer.Option(
        "--shots",
        metavar="N,...",
        help="Demonstrations to show; several numbers are compared, and 0 shows none.",
    ),
]
Seeds = Annotated[
    list[str],
    typer.Option(
        "--demo-seed",
        metavar="N,...",
        help="Of the draw of demonstrations; each text is asked once for each.",
    ),
]
Normalize = Annotated[
    Literal["auto", "sum", "mean"],
    typer.Option(
        "--normalize",
        help="How a choice's tokens are counted together; auto: the mean for the texts of "
        "multiple choice, else the sum.",
    ),
]
Windows = Annotated[
    int | None,
    typer.Option(
        "--windows",
        min=1,
        metavar="N",
        help="Windows to spread the demonstrations over. Default: one for every eight, up to "
        "eight; more where those don't hold them.",
        show_default=False,
    ),
]
WindowTokens = Annotated[
    int | None,
    typer.Option(
        "--window-tokens",
        min=1,
        metavar="N",
        help="Or how long a window is at most.",
        show_default=False,
    ),
]
Wording = Annotated[
    Literal["pcw", "structured-prompting"],
    typer.Option("--wording", help="Whose templates and labels a named task takes."),
]
Choices = Annotated[
    Literal["text", "letters"],
    typer.Option(
        "--choices", help="Multiple choice: compare the choices' texts, or the letters they have."
    ),
]

SHOTS = ["32"]
SEEDS = ["0"]


@spreading(without=("max_new_tokens", "max_window_tokens"))
def icl(
    *,
    task: Task,
    demos: Demos = None,
    test: Test = None,
    model: options.Model = "tiny-learner",
    methods: own.Methods = own.METHODS,
    shots: Shots = SHOTS,
    demo_seed: Seeds = SEEDS,
    windows: Windows = None,
    window_tokens: WindowTokens = None,
    normalize: Normalize = "auto",
    calibrate_with: CalibrateWith = None,
    template: Template = None,
    label: Labels = None,
    wording: Wording = "pcw",
    choices: Choices = "text",
    asking: Asking,
    reading: Reading,
) -> None:
    """In-context learning: classification and multiple choice, demonstrations in windows."""
    from rag_windows.cli.evaluation.running import Search
    from rag_windows.cli.evaluation.source import Source

    depths = own.numbers(shots, "--shots", least=0)
    chosen = {
        "demonstrations": None if demos is None else str(demos),
        "test": None if test is None else str(test),
        "seeds": own.numbers(demo_seed, "--demo-seed", least=0),
        "windows": windows,
        "window_tokens": window_tokens,
        "normalize": None if normalize == "auto" else normalize,
        "calibrate_with": calibrate_with or [],
        "template": template,
        "labels": label or None,
        "wording": wording,
        "choices_as": choices,
    }
    source = Source("icl", task, asking.limit, chosen)
    ask(source, Search("given", None), model, methods, depths, asking, reading)
