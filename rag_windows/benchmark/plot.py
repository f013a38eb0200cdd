"""A result as a picture."""

from __future__ import annotations

from pathlib import Path

from rag_windows.benchmark.result import Result, median
from rag_windows.errors import MissingExtraError

_MARKS = "osD^vP"


def draw(result: Result, path: Path) -> None:
    """Seconds to the first token and tokens per second against the context, as PNG.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtraError(
            'Drawing needs matplotlib; run: pip install "rag-windows[figures]"'
        ) from error
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    first, speed = figure.subplots(1, 2)
    window, ragged = result.cells[0].window, result.cells[0].ragged
    cells = [c for c in result.cells if (c.window, c.ragged) == (window, ragged)]
    for mark, way in zip(_MARKS, dict.fromkeys(cell.way for cell in cells), strict=False):
        own = [cell for cell in cells if cell.way == way]
        contexts = [cell.context for cell in own]
        for axes, field in ((first, "first_s"), (speed, "tokens_per_s")):
            rounds = [getattr(cell, field) for cell in own]
            middle = [median(one) for one in rounds]
            errors = [
                [m - min(one) for m, one in zip(middle, rounds, strict=True)],
                [max(one) - m for m, one in zip(middle, rounds, strict=True)],
            ]
            axes.errorbar(contexts, middle, yerr=errors, marker=mark, capsize=3, label=way)
    ticks = sorted({cell.context for cell in cells})
    for axes, title in (
        (first, "Seconds to the first token"),
        (speed, "Tokens per second behind the first"),
    ):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(ticks, [f"{one // 1024}K" if one >= 1024 else str(one) for one in ticks])
        axes.set_xlabel(f"tokens of context, windows of {window}")
        axes.set_title(title, loc="left", fontsize=11)
        axes.grid(visible=True, which="major", alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    handles, labels = first.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, frameon=False, fontsize=9)
    figure.suptitle(
        f"{result.shape}, {result.dtype}, {result.machine.device}, "
        f"{result.machine.threads} threads; medians, smallest and largest round",
        fontsize=9,
        x=0.01,
        ha="left",
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
