"""The commands `rag-windows eval score ...`: answers that are there, without a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rag_windows.cli import options
from rag_windows.cli.errors import Group
from rag_windows.cli.evaluation import options as own
from rag_windows.cli.evaluation.chatrag_command import Dataset

score = typer.Typer(help="Score a finished file of predictions alone.", cls=Group)

Answerable = Annotated[
    Path | None,
    typer.Option(
        "--answerable",
        metavar="FILE",
        help="QuAC: the benchmark's list of the questions that can be answered.",
        show_default=False,
    ),
]


ByType = Annotated[
    bool, typer.Option("--by-type", help="For each type of response instead of all together.")
]


@score.command()
def inscit(
    data: own.Data,
    predictions: own.Predictions,
    by_type: ByType = False,
    json: options.Json = False,
) -> None:
    """INSCIT's own metrics (evidence F1, sacreBLEU, response F1), and ChatRAG-Bench's F1."""
    from rag_windows.cli.evaluation.scoring import show_parts, show_scores
    from rag_windows.evaluation.scores.file import score_inscit, score_inscit_by_type

    if by_type:
        show_parts(score_inscit_by_type(data, predictions), as_json=json)
        return
    show_scores(score_inscit(data, predictions), as_json=json)


@score.command()
def chatrag(
    data: own.Data,
    dataset: Dataset,
    predictions: own.Predictions,
    answerable: Answerable = None,
    json: options.Json = False,
) -> None:
    """ChatRAG-Bench's metrics of a file with an answer a line."""
    from rag_windows.cli.evaluation.scoring import show_scores
    from rag_windows.evaluation.scores.file import score_chatrag

    show_scores(score_chatrag(data, dataset, predictions, answerable), as_json=json)
