"""Accuracy against the number of windows."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure

from benchmarks.judgement.entries import BASE, Entry
from benchmarks.judgement.panels import (
    COLOURS,
    GREY,
    INK,
    MARKERS,
    families_of,
    legend_right,
    plain,
    windows_axis,
)
from benchmarks.judgement.summary import Row, Summary
from benchmarks.judgement.tables import TRAINED


def accuracy(summary: Summary, model: str, task: str, entries: Sequence[Entry]) -> Figure:
    """Accuracy against windows: a panel a family, the other methods grey behind it."""
    families = families_of(entries)
    sizes = summary.passages(model, task)
    columns = 2
    rows = -(-len(families) // columns)
    figure = Figure(figsize=(13, 2.9 * rows + 0.6), layout="constrained")
    figure.suptitle(f"{task}, {model}: right answers in percent, with 95% intervals", fontsize=13)
    panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flatten()
    for axes in panels[len(families) :]:
        axes.set_visible(False)
    for axes, (family, labels) in zip(panels, families.items(), strict=False):
        plain(axes)
        for entry in entries:
            if entry.label not in (BASE, *labels):
                found = _line(summary, model, task, entry.label)
                axes.plot(*_points(found), color=GREY, linewidth=0.9, zorder=1)
        found = _line(summary, model, task, BASE)
        axes.plot(*_points(found), "--", color=INK, linewidth=1.6, label=BASE, zorder=3)
        for place, (label, colour) in enumerate(zip(labels, COLOURS, strict=False)):
            found = _line(summary, model, task, label)
            if not found:
                continue
            axes.plot(
                *_points(found),
                color=colour,
                marker=MARKERS[place],
                # Lines that coincide stay visible: the later ones are smaller.
                markersize=8 - 1.2 * place,
                linewidth=3 - 0.5 * place,
                label=label,
                zorder=4,
            )
            axes.fill_between(
                [row.passages for row in found],
                [100 * row.accuracy.low for row in found],
                [100 * row.accuracy.high for row in found],
                color=colour,
                alpha=0.18,
                linewidth=0,
                zorder=2,
            )
        axes.set_title(family, fontsize=11)
        if sizes and sizes[-1] > TRAINED:
            axes.axvspan(TRAINED * 2**0.5, sizes[-1] * 1.15, color="#f5f5f5", zorder=0)
        windows_axis(axes, sizes)
        axes.set_ylim(-2, 103)
        legend_right(axes)
    for axes in panels[max(0, len(families) - columns) : len(families)]:
        axes.set_xlabel("passages (windows); shaded: more than in training", fontsize=9)
        axes.tick_params(labelbottom=True)
    return figure


def _line(summary: Summary, model: str, task: str, label: str) -> list[Row]:
    sizes = summary.passages(model, task)
    found = [summary.rows.get((model, task, size, label)) for size in sizes]
    return [row for row in found if row is not None]


def _points(rows: Sequence[Row]) -> tuple[list[int], list[float]]:
    return [row.passages for row in rows], [100 * row.accuracy.value for row in rows]
