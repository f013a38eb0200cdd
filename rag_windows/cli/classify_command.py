"""The command `rag-windows classify` and its options."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from rag_windows.cli import options
from rag_windows.cli.answering_options import Kept
from rag_windows.cli.spreading import spreading

Texts = Annotated[list[str], typer.Argument(metavar="TEXT...", help="What to label, each quoted.")]
Demos = Annotated[
    str,
    typer.Option(
        "--demos", metavar="FILE", help='Demonstrations: JSONL with "text" and "label" a line.'
    ),
]
Labels = Annotated[
    list[str] | None,
    typer.Option(
        "--label",
        metavar="LABEL",
        help="A label to choose from; repeat it for each. Default: those of the demonstrations.",
        show_default=False,
    ),
]
Template = Annotated[
    str | None,
    typer.Option(
        "--template",
        metavar="FORM",
        help='How a demonstration is written. Default: "{text}: {label}".',
        show_default=False,
    ),
]
Normalize = Annotated[
    Literal["sum", "mean"],
    typer.Option("--normalize", help="How a label's tokens are counted together."),
]
CalibrateWith = Annotated[
    list[str] | None,
    typer.Option(
        "--calibrate-with",
        metavar="TEXT",
        help="A text that says nothing, such as N/A: its label probabilities divide the others.",
        show_default=False,
    ),
]
Windows = Annotated[
    int | None,
    typer.Option(
        "--windows",
        min=1,
        metavar="N",
        help="Windows to spread the demonstrations over. Default: as few as hold them.",
        show_default=False,
    ),
]
WindowTokens = Annotated[
    int | None,
    typer.Option(
        "--window-tokens",
        min=1,
        metavar="N",
        help="Or how long a window is at most. Default: what the model allows.",
        show_default=False,
    ),
]


@spreading()
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
    model: options.Model = "tiny-learner",
    method: options.MethodName = None,
    rag_temperature: options.RagTemperature = None,
    rag_scale: options.RagScale = None,
    profile: options.ProfilePath = None,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    system: options.System = None,
    kept: Kept,
) -> None:
    """Label texts as demonstrations show it, with as many of them as there are."""
    from rag_windows.cli.classify import ClassifyOptions
    from rag_windows.cli.classify import classify as run
    from rag_windows.cli.engine import ModelOptions

    run(
        texts,
        demos,
        ClassifyOptions(
            labels=label or None,
            template=template,
            normalize=normalize,
            calibrate_with=calibrate_with or (),
            windows=windows,
            window_tokens=window_tokens,
            system=system,
            as_json=kept.json,
        ),
        ModelOptions(
            model,
            method,
            rag_temperature,
            rag_scale,
            device,
            dtype,
            verbose=kept.verbose,
            cache=not kept.no_cache,
            cache_dir=kept.cache_dir,
            profile=profile,
        ),
    )
