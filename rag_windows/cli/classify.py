"""The command `classify`: labels for texts, learnt from a file of demonstrations."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Annotated, Literal

import typer
from rich.table import Column
from rich.text import Text

from rag_windows.cli import options
from rag_windows.cli.options import ModelOptions, count, loaded_model, option, text_option
from rag_windows.cli.render import console, plain_table, progress, show, write_json
from rag_windows.prompt.visible_text import encodable, one_line


@dataclass(frozen=True, slots=True)
class _Learner(ModelOptions):
    """The model that classifies."""

    model: options.Model = "tiny-learner"


@options.spreading(without=("max_window_tokens",))
def classify(
    *,
    texts: Annotated[
        list[str], typer.Argument(metavar="TEXT...", help="What to label, each quoted.")
    ],
    demos: Annotated[str, option("FILE", 'Demonstrations: JSONL with "text" and "label" a line.')],
    label: Annotated[
        list[str] | None,
        text_option("LABEL", "To choose from, repeated for each. Default: those of --demos."),
    ] = None,
    template: Annotated[str | None, text_option("FORM", 'Default: "{text}: {label}".')] = None,
    normalize: Annotated[
        Literal["sum", "mean"], option(None, "How a label's tokens are counted together.")
    ] = "sum",
    calibrate_with: Annotated[
        list[str] | None,
        text_option("TEXT", "One that says nothing, as N/A: its probabilities divide the others."),
    ] = None,
    windows: Annotated[int | None, count("Default: as few as hold the demonstrations.")] = None,
    window_tokens: Annotated[int | None, count("Or how long a window is at most.")] = None,
    system: options.System = None,
    model: _Learner,
    json: options.Json = False,
) -> None:
    """Label texts as demonstrations show it, with as many of them as there are."""
    from rag_windows.calibration.calibrate import read_lines
    from rag_windows.icl.classifier import demonstration_of

    shown = read_lines(demos, demonstration_of, '{"text": "...", "label": "..."}')
    with loaded_model(model) as lm:
        begun = time.perf_counter()
        with progress("Reading the demonstrations"):
            found = lm.classify(
                [encodable(text) for text in texts],
                shown,
                label or None,
                template=template,
                prefix=system,
                normalize=normalize,
                calibrate_with=calibrate_with or (),
                windows=windows,
                window_tokens=window_tokens,
            )
        seconds, method = time.perf_counter() - begun, lm.method.name
    if json:
        fields = ("text", "label", "probabilities", "scores")
        write_json(
            {
                "texts": [{name: getattr(one, name) for name in fields} for one in found],
                "demonstrations": len(shown),
                "windows": found[0].windows,
                "seconds": seconds,
                "method": method,
                "model": model.name,
            }
        )
        return
    probability = Column(justify="right", no_wrap=True, min_width=len("100%"))
    text = Column("text", no_wrap=True, overflow="ellipsis", style="dim")
    table = plain_table("label", probability, text)
    for one in found:
        share = f"{one.probabilities[one.label]:.0%}"
        table.add_row(Text(one_line(one.label), "bold"), share, Text(one_line(one.text)))
    console().print(table)
    count = f"{found[0].windows} window{'s' * (found[0].windows != 1)}"
    show(f"{model.name}, {method}: {len(shown)} demonstrations in {count}, {seconds:.2f} s.", "dim")
