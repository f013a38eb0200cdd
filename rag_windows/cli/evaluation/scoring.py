"""Scores of a file of predictions on the terminal."""

from __future__ import annotations

import math
from collections.abc import Mapping

from rich.table import Table
from rich.text import Text

from rag_windows.cli import render
from rag_windows.prompt.visible_text import one_line

Scores = Mapping[str, float]


def show_scores(scores: Scores, *, as_json: bool) -> None:
    """Print scores: percent, and "n", how many answers they are of."""
    if as_json:
        render.write_json(_plain(scores))
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    table.add_column("")
    table.add_column("", justify="right")
    for name, value in scores.items():
        table.add_row(name, _shown(name, value))
    render.console().print(table)


def show_parts(parts: Mapping[str, Scores], *, as_json: bool) -> None:
    """Print the scores of several parts, a row each."""
    if as_json:
        render.write_json({name: _plain(scores) for name, scores in parts.items()})
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("")
    names = list(next(iter(parts.values()), {}))
    for name in names:
        table.add_column(name, justify="right")
    for part, scores in parts.items():
        cells = [_shown(name, scores[name]) for name in names]
        table.add_row(Text(one_line(part)), *cells)
    render.console().print(table)


def _plain(scores: Scores) -> dict[str, float | None]:
    # NaN is no JSON: a score of no question at all is null.
    return {name: None if math.isnan(value) else value for name, value in scores.items()}


def _shown(name: str, value: float) -> str:
    if math.isnan(value):
        return "-"
    return str(value) if name == "n" else f"{value:.2f}"
