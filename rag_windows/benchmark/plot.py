"""A result as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rag_windows.benchmark.plan import WAYS
from rag_windows.benchmark.result import Cell, Result, median
from rag_windows.errors import MissingExtraError
from rag_windows.hints import missing

_STYLES = {
    way: (mark, colour)
    for way, mark, colour in zip(
        WAYS, "osD^v", ("#555555", "#a8751a", "#1f6fb4", "#c0392b", "#2e8b57"), strict=True
    )
}
_PANELS = (
    ("first_s", "Seconds to the first token"),
    ("tokens_per_s", "Tokens per second behind the first"),
)


def draw(result: Result, path: Path) -> None:
    """Seconds to the first token and tokens per second against the context, as PNG.

    Each length of windows has a row of its own; with a single context, bars stand for lines.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtraError(missing("Drawing", "matplotlib", "figures")) from error
    sorts = list(dict.fromkeys(cell.place.windows for cell in result.cells))
    figure = Figure(figsize=(11, 0.9 + 3.4 * len(sorts)), layout="constrained")
    grid = figure.subplots(len(sorts), 2, squeeze=False)
    contexts = sorted({cell.context for cell in result.cells})
    for row, sort in zip(grid, sorts, strict=True):
        cells = [cell for cell in result.cells if cell.place.windows == sort]
        for axes, (field, title) in zip(row, _PANELS, strict=True):
            axes.set_title(title, loc="left", fontsize=11)
            axes.spines[["top", "right"]].set_visible(False)
            if len(contexts) == 1:
                _bars(axes, cells, field)
                axes.set_xlabel(f"{contexts[0]:,} tokens of context, {sort}", fontsize=9)
            else:
                _lines(axes, cells, field, contexts)
                axes.set_xlabel(f"tokens of context, {sort}", fontsize=9)
    if len(contexts) > 1:
        handles, labels = grid[0][0].get_legend_handles_labels()
        figure.legend(
            handles, labels, loc="outside lower center", ncols=5, frameon=False, fontsize=9
        )
    plural = "s" if result.machine.threads > 1 else ""
    figure.suptitle(
        f"{result.shape}, {result.dtype}, {result.machine.device}, "
        f"{result.machine.threads} thread{plural}; medians, smallest and largest round",
        fontsize=9,
        x=0.01,
        ha="left",
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def _lines(axes: Any, cells: Sequence[Cell], field: str, contexts: Sequence[int]) -> None:
    for way in dict.fromkeys(cell.way for cell in cells):
        own = [cell for cell in cells if cell.way == way]
        rounds = [getattr(cell, field) for cell in own]
        mark, colour = _STYLES[way]
        axes.errorbar(
            [cell.context for cell in own],
            [median(one) for one in rounds],
            yerr=_errors(rounds),
            marker=mark,
            color=colour,
            capsize=3,
            label=way,
        )
    from matplotlib.ticker import LogLocator, NullFormatter

    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xticks(contexts, [_short(one) for one in contexts])
    axes.grid(visible=True, which="major", alpha=0.3)


def _bars(axes: Any, cells: Sequence[Cell], field: str) -> None:
    rounds = [getattr(cell, field) for cell in cells]
    middle = [median(one) for one in rounds]
    colours = [_STYLES[cell.way][1] for cell in cells]
    names = [cell.way for cell in cells]
    axes.barh(names, middle, xerr=_errors(rounds), color=colours, height=0.6, capsize=3)
    for index, (value, own) in enumerate(zip(middle, rounds, strict=True)):
        axes.annotate(
            f"{value:#.3g}".rstrip("."),
            (max(own), index),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
        )
    axes.invert_yaxis()
    axes.margins(x=0.15)


def _errors(rounds: Sequence[Sequence[float]]) -> list[list[float]]:
    middle = [median(one) for one in rounds]
    return [
        [m - min(one) for m, one in zip(middle, rounds, strict=True)],
        [max(one) - m for m, one in zip(middle, rounds, strict=True)],
    ]


def _short(context: int) -> str:
    return f"{context // 1024}K" if context % 1024 == 0 else f"{context:,}"
