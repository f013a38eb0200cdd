"""The chart of quality against the number of windows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rag_windows.evaluation.report import drawing
from rag_windows.evaluation.report.palette import looks
from rag_windows.evaluation.report.ticks import logarithmic

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MOST = 5
"""Lines beside the base that an eye can follow in one panel."""

_LEAST = 5.0
"""Points that the vertical axis spans at least, so that trifles look like trifles."""

_EDGE = 0.3
"""Room for a line at 0 or at 100 percent."""


@dataclass(frozen=True, slots=True)
class Point:
    """A figure with its interval, in percent, at one number of windows."""

    windows: float
    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Curve:
    """One method's points, by number of windows."""

    method: str
    points: tuple[Point, ...]


def draw(curves: Sequence[Curve], base: str, unit: str, width: int) -> Figure:
    """A line a method with its band of intervals.

    More methods than an eye can follow are shared out among panels; the base is in each.

    Args:
        curves: at least one with two points.
        base: name of the method that the others are compared with.
        unit: of the vertical axis.
        width: in CSS pixels.
    """
    panels = _shared([one.method for one in curves], base)
    known = {one.method: one for one in curves}
    columns = 1 if width < drawing.WIDE else min(2, len(panels))
    rows = -(-len(panels) // columns)
    across = min(drawing.columns_of_legend(panel, width // columns) for panel in panels)
    below = max(-(-len(panel) // across) for panel in panels)
    figure = drawing.blank(width, (300 + 22 * below) * rows)
    grid = figure.subfigures(rows, columns, squeeze=False).flatten()
    limits = _limits(curves)
    for part, panel in zip(grid, panels, strict=False):
        axes = part.subplots()
        drawing.plain(axes)
        appearance = looks(panel, base)
        for order, method in enumerate(panel):
            points = known[method].points
            drawing.line(
                axes,
                appearance[method],
                [one.windows for one in points],
                [one.value for one in points],
                ([one.low for one in points], [one.high for one in points]),
                label=method,
                order=order,
            )
        every = sorted({point.windows for one in curves for point in one.points})
        logarithmic(axes.xaxis, every, width // columns - 90, base=2)
        axes.set_xlabel("passages or demonstrations")
        axes.set_ylabel(unit)
        axes.set_ylim(limits)
        handles, labels = axes.get_legend_handles_labels()
        drawing.legend(part, handles, labels, across)
    return figure


def _shared(methods: Sequence[str], base: str) -> list[list[str]]:
    others = [name for name in methods if name != base]
    first = [base] if base in methods else []
    if len(others) <= _MOST:
        return [first + others]
    count = -(-len(others) // (_MOST - 1))
    size = -(-len(others) // count)
    return [first + others[start : start + size] for start in range(0, len(others), size)]


def _limits(curves: Sequence[Curve]) -> tuple[float, float]:
    lows = min(point.low for one in curves for point in one.points)
    highs = max(point.high for one in curves for point in one.points)
    room = max(0.06 * (highs - lows), (_LEAST - (highs - lows)) / 2)
    return max(lows - room, min(0.0, lows)) - _EDGE, min(highs + room, max(100.0, highs)) + _EDGE
