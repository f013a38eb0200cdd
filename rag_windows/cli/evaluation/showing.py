"""A run's figures on the terminal."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from rag_windows.cli import render
from rag_windows.prompt.visible_text import visible

if TYPE_CHECKING:
    from rag_windows.cli.evaluation.finishing import Finished


def show(finished: Finished, *, as_json: bool) -> None:
    """Print the summary and the paths of what was written.

    Args:
        finished: of a run.
        as_json: one JSON object instead: the summary, with "files" beside it.
    """
    if as_json:
        render.write_json(as_object(finished))
        return
    from rag_windows.evaluation.summary_table import summary_table

    out = render.console()
    out.print(visible(summary_table(finished.summary)).rstrip(), soft_wrap=True)
    for text in finished.beside:
        out.print()
        out.print(visible(text).rstrip(), soft_wrap=True)
    out.print()
    for name, paths in (
        ("Scores", [] if finished.scores is None else [finished.scores]),
        ("Predictions", list(finished.predictions.values())),
        ("Report", list(finished.report)),
    ):
        if paths:
            told = visible(", ".join(map(str, paths)))
            out.print(f"{name}: {told}", style="dim", soft_wrap=True)


def as_object(finished: Finished) -> dict[str, object]:
    """The summary as JSON, with "files" beside it."""
    from rag_windows.evaluation.summary_json import dump

    return {
        **json.loads(dump(finished.summary)),
        "files": {
            "folder": str(finished.folder),
            "scores": None if finished.scores is None else str(finished.scores),
            "predictions": {arm: str(path) for arm, path in finished.predictions.items()},
            "report": [str(path) for path in finished.report],
        },
    }
