"""The chart of what is kept, by kind of question."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rag_windows.evaluation.report import drawing
from rag_windows.evaluation.report.palette import GROUND, INK, looks

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_HIGHEST = 250.0
"""Percent: an interval that goes on beyond ends in an arrow."""

_LEAST = 10.0
"""Percent that are shown on either side of the base at least."""

_BOLD = 10
"""Width of a character in CSS pixels, generously."""


@dataclass(frozen=True, slots=True)
class Kept:
    """Retention of one method over the questions of one kind, in percent.

    Attributes:
        kind: the dataset's word.
        method: name.
        value: retention.
        low: of its interval.
        high: likewise.
        count: questions.
    """

    kind: str
    method: str
    value: float
    low: float
    high: float
    count: int


def draw(kept: Sequence[Kept], base: str, width: int) -> Figure:
    """A group of whiskers a kind, against the line of 100 percent.

    Args:
        kept: at least one, of the other methods; the base has 100 percent everywhere.
        base: its name.
        width: in CSS pixels.
    """
    from matplotlib.transforms import blended_transform_factory

    kinds = list(dict.fromkeys(one.kind for one in kept))
    methods = list(dict.fromkeys(one.method for one in kept))
    step = 20 if len(methods) < 8 else 15
    high = 34 + step * len(methods)
    columns = drawing.columns_of_legend([*methods, base], width)
    below = -(-(len(methods) + 1) // columns)
    figure = drawing.blank(width, high * len(kinds) + 70 + 22 * below)
    axes = figure.subplots()
    drawing.plain(axes, grid="x")
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)
    appearance = looks(methods, base)
    top = min(_HIGHEST, max([*(one.high for one in kept), 100.0 + _LEAST]))
    end = top * 1.03
    for order, method in enumerate(methods):
        look = appearance[method]
        rows = [one for one in kept if one.method == method]
        places = [_place(kinds.index(one.kind), order, len(methods), high, step) for one in rows]
        for place, one in zip(places, rows, strict=True):
            axes.plot(
                [min(one.low, end), min(one.high, end)], [place, place], color=look.colour, lw=2
            )
            if one.high > end:
                axes.plot(
                    [end], [place], marker=">", markersize=6, color=look.colour, clip_on=False
                )
        inside = [(p, one.value) for p, one in zip(places, rows, strict=True) if one.value <= end]
        axes.plot(
            [value for _, value in inside],
            [place for place, _ in inside],
            linestyle="none",
            marker=look.marker,
            markersize=7.5,
            color=look.colour,
            label=drawing.short(method),
        )
    axes.axvline(
        100, color=INK, linestyle=(0, (5, 3)), linewidth=1.4, zorder=1, label=drawing.short(base)
    )
    spread = blended_transform_factory(axes.transAxes, axes.transData)
    for row, kind in enumerate(kinds):
        counts = {one.count for one in kept if one.kind == kind}
        count = f"{min(counts):,}" if len(counts) == 1 else f"{min(counts):,} to {max(counts):,}"
        counted = f" (n = {count})"
        axes.text(
            0,
            row * high + 11,
            drawing.short(kind, (width - 30) // _BOLD - len(counted)) + counted,
            transform=spread,
            ha="left",
            va="center",
            fontweight="bold",
            fontsize=14,
            # The line of 100 percent may pass behind it.
            bbox={"facecolor": GROUND, "edgecolor": "none", "pad": 1.5},
        )
    axes.set_yticks([])
    axes.set_ylim(high * len(kinds), -6)
    least = min([*(one.low for one in kept), 100.0 - _LEAST])
    axes.set_xlim(least - 0.04 * (end - least), end)
    axes.set_xlabel(f"percent of {drawing.short(base)}")
    handles, labels = axes.get_legend_handles_labels()
    drawing.legend(figure, handles, labels, columns)
    return figure


def _place(kind: int, order: int, methods: int, high: int, step: int) -> float:
    """Where a whisker stands, from the top, in the units of the figure's height."""
    return kind * high + 22 + step * (order + 0.5)
