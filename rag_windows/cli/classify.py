"""The command `classify`: labels for texts, learnt from a file of demonstrations."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.text import Text

from rag_windows.cli import options, render
from rag_windows.cli.models import ModelOptions, closing_cache, load_model
from rag_windows.cli.progress import Progress
from rag_windows.errors import InputError
from rag_windows.prompt.visible_text import encodable, one_line

if TYPE_CHECKING:
    from rag_windows.icl import Classification, Demonstration

Texts = Annotated[list[str], typer.Argument(metavar="TEXT...", help="What to label, each quoted.")]
Demos = Annotated[
    str,
    typer.Option(metavar="FILE", help='Demonstrations: JSONL with "text" and "label" a line.'),
]
Labels = Annotated[
    list[str] | None,
    typer.Option(
        metavar="LABEL",
        help="A label to choose from; repeat it for each. Default: those of the demonstrations.",
    ),
]
Template = Annotated[
    str | None,
    typer.Option(
        metavar="FORM",
        help='How a demonstration is written. Default: "{text}: {label}".',
    ),
]
Normalize = Annotated[
    Literal["sum", "mean"], typer.Option(help="How a label's tokens are counted together.")
]
CalibrateWith = Annotated[
    list[str] | None,
    typer.Option(
        metavar="TEXT",
        help="A text that says nothing, such as N/A: its label probabilities divide the others.",
    ),
]
Windows = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="N",
        help="Windows to spread the demonstrations over. Default: as few as hold them.",
    ),
]
WindowTokens = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="N",
        help="Or how long a window is at most. Default: what the model allows.",
    ),
]


@dataclasses.dataclass(frozen=True, slots=True)
class _Learner(ModelOptions):
    """The model that classifies."""

    model: options.Model = "tiny-learner"


@options.spreading(without=("max_window_tokens",))
def classify(
    *,
    texts: Texts,
    demos: Demos,
    label: Labels = None,
    template: Template = None,
    normalize: Normalize = "sum",
    calibrate_with: CalibrateWith = None,
    windows: Windows = None,
    window_tokens: WindowTokens = None,
    system: options.System = None,
    learner: _Learner,
    json: options.Json = False,
) -> None:
    """Label texts as demonstrations show it, with as many of them as there are."""
    shown = read_demonstrations(demos)
    progress = Progress()
    lm = load_model(learner, progress)
    begun = time.perf_counter()
    with closing_cache(lm), progress.waiting("Reading the demonstrations"):
        found = lm.classify(
            [encodable(text) for text in texts],
            shown,
            [encodable(one) for one in label] if label else None,
            template=None if template is None else encodable(template),
            prefix=None if system is None else encodable(system),
            normalize=normalize,
            calibrate_with=[encodable(text) for text in calibrate_with or ()],
            windows=windows,
            window_tokens=window_tokens,
        )
    seconds = time.perf_counter() - begun
    if json:
        fields = ("text", "label", "probabilities", "scores")
        render.write_json(
            {
                "texts": [{name: getattr(one, name) for name in fields} for one in found],
                "demonstrations": len(shown),
                "windows": found[0].windows,
                "seconds": seconds,
                "method": lm.method.name,
                "model": learner.name,
            }
        )
        return
    _show(found)
    count = f"{found[0].windows} window{'s' * (found[0].windows != 1)}"
    render.dim(
        f"{learner.name}, {lm.method.name}: {len(shown)} demonstrations in {count}, "
        f"{seconds:.2f} s."
    )


def read_demonstrations(path: str) -> list[Demonstration]:
    """Demonstrations of a JSONL file; blank lines count for nothing.

    Raises:
        InputError: the file can't be read, or naming the line that is no demonstration.
    """
    from rag_windows.icl.demonstrations import demonstrations_of

    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} can't be read as a text of UTF-8: {error}.") from error
    made = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            made += demonstrations_of([json.loads(line)])
        except (ValueError, RecursionError, InputError) as error:
            raise InputError(
                f'{path}, line {number}: no object such as {{"text": "...", "label": "..."}}: '
                f"{error}"
            ) from error
    if not made:
        raise InputError(f"{path} holds no demonstrations.")
    return made


def _show(found: Sequence[Classification]) -> None:
    table = render.plain_table()
    table.add_column("label")
    table.add_column("", justify="right", no_wrap=True, min_width=len("100%"))
    table.add_column("text", no_wrap=True, overflow="ellipsis", style="dim")
    for one in found:
        table.add_row(
            Text(one_line(one.label), style="bold"),
            f"{one.probabilities[one.label]:.0%}",
            Text(one_line(one.text)),
        )
    render.console().print(table)
