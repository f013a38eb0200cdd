"""The command `rag-windows calibrate` and its options."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from rag_windows.cli import options
from rag_windows.cli.answering_options import Kept
from rag_windows.cli.spreading import spreading

Examples = Annotated[
    str | None,
    typer.Option(
        "--examples",
        metavar="FILE",
        help='JSONL with "query", and perhaps "passages", "answer" and "kind". Without passages '
        "they are retrieved from --docs. Default: the sample corpus's questions.",
        show_default=False,
    ),
]
Out = Annotated[
    str | None,
    typer.Option(
        "--out", metavar="FILE", help="Write the profile here, for --profile.", show_default=False
    ),
]
Plot = Annotated[
    str | None,
    typer.Option(
        "--plot", metavar="FILE", help="Draw all settings into this PNG.", show_default=False
    ),
]
By = Annotated[
    Literal["auto", "labels", "agreement"],
    typer.Option(
        "--by",
        help="What decides: right answers, or agreement with sequential reading; auto takes "
        "answers where every example has one.",
    ),
]
Limit = Annotated[
    int, typer.Option("--limit", min=1, metavar="N", help="Take the first N examples at most.")
]
Seed = Annotated[int, typer.Option("--seed", min=0, metavar="N", help="Of folds and intervals.")]
Calibrated = Annotated[
    str,
    typer.Option(
        "--method", metavar="NAME", help="Whose numbers to choose; see rag-windows methods."
    ),
]


@spreading()
def calibrate(
    *,
    examples: Examples = None,
    docs: options.Docs = None,
    strict: options.Strict = False,
    model: options.ReaderModel = None,
    method: Calibrated = "ape",
    out: Out = None,
    plot: Plot = None,
    by: By = "auto",
    limit: Limit = 64,
    top_k: options.TopK = 8,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    max_new_tokens: options.MaxNewTokens = 32,
    system: options.System = None,
    seed: Seed = 0,
    passage_words: options.PassageWords = 120,
    max_window_tokens: options.MaxWindowTokens = None,
    kept: Kept,
) -> None:
    """Choose a method's numbers for a model and its documents, and say whether they beat the usual.

    Give the instruction (--system) and the lengths that the questions will have.
    """
    from rag_windows.cli.calibrate import CalibrateOptions
    from rag_windows.cli.calibrate import calibrate as run
    from rag_windows.cli.corpus import SearchOptions
    from rag_windows.cli.engine import ModelOptions, reader_model

    run(
        SearchOptions(docs, top_k, passage_words, strict),
        CalibrateOptions(
            examples=examples,
            method=method,
            by=None if by == "auto" else by,
            limit=limit,
            system=system,
            max_new_tokens=max_new_tokens,
            seed=seed,
            out=out,
            plot=plot,
            as_json=kept.json,
        ),
        ModelOptions(
            reader_model(model, docs),
            device=device,
            dtype=dtype,
            max_window_tokens=max_window_tokens,
            verbose=kept.verbose,
            cache=not kept.no_cache,
            cache_dir=kept.cache_dir,
        ),
    )
