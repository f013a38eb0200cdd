"""The chart of the time to the first token against the length of the context."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rag_windows.evaluation.report import drawing
from rag_windows.evaluation.report.palette import looks
from rag_windows.evaluation.report.ticks import logarithmic, seconds
from rag_windows.evaluation.summary import SpeedBin

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_PANELS = (("cold_s", "cold: nothing cached"), ("warm_s", "warm: all cached in memory"))


def draw(speeds: Mapping[str, Sequence[SpeedBin]], base: str, width: int) -> Figure:
    """Cold and warm, a panel each with the same axes; a line a method.

    Args:
        speeds: by method, at least one with a time.
        base: name of the method that the others are compared with.
        width: in CSS pixels.
    """
    across = width >= drawing.WIDE
    methods = list(speeds)
    columns = drawing.columns_of_legend(methods, width)
    below = -(-len(methods) // columns)
    figure = drawing.blank(width, (340 if across else 540) + 22 * below)
    shape = (1, 2) if across else (2, 1)
    panels = figure.subplots(*shape, sharex=True, sharey=True, squeeze=False).flatten()
    appearance = looks(methods, base)
    for axes, (field, title) in zip(panels, _PANELS, strict=True):
        drawing.plain(axes)
        axes.set_title(title, loc="left", fontsize=14)
        axes.tick_params(labelbottom=True)
        for order, method in enumerate(methods):
            points = [(one.tokens, getattr(one, field)) for one in speeds[method]]
            drawn = [(tokens, time) for tokens, time in points if _positive(tokens, time)]
            drawing.line(
                axes,
                appearance[method],
                [tokens for tokens, _ in drawn],
                [time for _, time in drawn],
                label=method,
                order=order,
            )
    every = [one for found in speeds.values() for one in found]
    times = [time for one in every for time in (one.cold_s, one.warm_s) if _positive(time)]
    lengths = [one.tokens for one in every if _positive(one.tokens)]
    logarithmic(
        panels[0].xaxis, lengths, (width / 2 if across else width) - 90, marks=_round(lengths)
    )
    seconds(panels[0].yaxis, times)
    for axes in panels[:1] if across else panels:
        axes.set_ylabel("time to the first token")
    for axes in panels if across else panels[1:]:
        axes.set_xlabel("tokens of context")
    handles, labels = panels[0].get_legend_handles_labels()
    drawing.legend(figure, handles, labels, columns)
    return figure


def _round(lengths: Sequence[float]) -> list[float]:
    """Round numbers between the shortest and the longest; the lengths where there are no two."""
    marks = (step * 10.0**power for power in range(8) for step in (1, 2, 5))
    inside = [mark for mark in marks if min(lengths) * 0.95 <= mark <= max(lengths) * 1.05]
    return inside if len(inside) > 1 else sorted(set(lengths))


def drawable(speeds: Sequence[SpeedBin]) -> bool:
    """Whether there is a point for a logarithmic scale."""
    return any(
        _positive(one.tokens) and (_positive(one.cold_s) or _positive(one.warm_s)) for one in speeds
    )


def _positive(*values: float) -> bool:
    return all(math.isfinite(value) and value > 0 for value in values)
