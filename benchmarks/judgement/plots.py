"""The pictures: a panel a family, so that no panel holds more lines than an eye can follow."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from benchmarks.judgement.entries import BASE, LINK_SHARES, PLAIN, Entry, linked
from benchmarks.judgement.run import SWEEP_PASSAGES, SWEEP_TASK
from benchmarks.judgement.summary import Row, Summary
from benchmarks.judgement.tables import TRAINED

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00")
"""Okabe and Ito's, which readers with any colour vision tell apart; markers differ, too."""

MARKERS = ("o", "s", "^", "D", "v")
GREY, INK = "#c8c8c8", "#222222"


def draw_all(summary: Summary, entries: Sequence[Entry], folder: Path) -> list[Path]:
    """Draw every picture for which there are figures.

    Returns:
        The files written.
    """
    mpl.rcParams["font.family"] = "DejaVu Sans"
    folder.mkdir(parents=True, exist_ok=True)
    drawn: list[tuple[str, Figure]] = [
        (f"{task}-{Path(model).name}", accuracy(summary, model, task, entries))
        for model, task in summary.sections
    ]
    if any(TRAINED in summary.passages(*section) for section in summary.sections):
        drawn.append(("retention", retention(summary, entries)))
    if summary.costs:
        drawn.append(("cost", cost(summary, entries)))
    sweep = next((one for one in summary.sections if one[1] == SWEEP_TASK), None)
    if sweep is not None and all(
        (*sweep, SWEEP_PASSAGES, entry.label) in summary.rows
        for share in LINK_SHARES
        for entry in linked(share)
    ):
        drawn.append(("links", links(summary, *sweep)))
    paths = []
    for name, figure in drawn:
        paths.append(folder / f"{name}.png")
        figure.savefig(paths[-1], dpi=110, facecolor="white", metadata={"Software": None})
    return paths


def _families(entries: Sequence[Entry]) -> dict[str, list[str]]:
    """Labels by family; the sequential reader is drawn in every panel and has none."""
    families: dict[str, list[str]] = {}
    for entry in entries:
        if entry.label != BASE:
            families.setdefault(entry.family, []).append(entry.label)
    return families


def _windows_axis(axes: Axes, sizes: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(sizes))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:.0f}"))


def _plain(axes: Axes) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.grid(axis="y", color="#e6e6e6", linewidth=0.7)
    axes.set_axisbelow(True)


def accuracy(summary: Summary, model: str, task: str, entries: Sequence[Entry]) -> Figure:
    """Accuracy against windows: a panel a family, the other methods grey behind it."""
    families = _families(entries)
    sizes = summary.passages(model, task)
    columns = 3
    rows = -(-len(families) // columns)
    figure = Figure(figsize=(12, 3.4 * rows + 0.7), layout="constrained")
    figure.suptitle(f"{task}, {model}: right answers in percent, with 95% intervals", fontsize=13)
    panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flatten()
    for axes in panels[len(families) :]:
        axes.set_visible(False)
    for axes, (family, labels) in zip(panels, families.items(), strict=False):
        _plain(axes)
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
        _windows_axis(axes, sizes)
        axes.set_ylim(-2, 103)
        axes.legend(fontsize=8, loc="lower left", framealpha=0.85)
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


def retention(summary: Summary, entries: Sequence[Entry]) -> Figure:
    """Right answers for each right one of the sequential reader: a panel a task."""
    sections = [one for one in summary.sections if TRAINED in summary.passages(*one)]
    labels = [entry.label for entry in entries if entry.label != BASE]
    figure = Figure(
        figsize=(2.6 * len(sections) + 2.4, 0.3 * len(labels) + 1.6), layout="constrained"
    )
    figure.suptitle(
        f"Right answers in percent of the sequential reader's, {TRAINED} passages", fontsize=13
    )
    panels = figure.subplots(1, len(sections), sharey=True, squeeze=False)[0]
    families = list(_families(entries))
    colour_of = {
        entry.label: (*COLOURS, "#56b4e9")[families.index(entry.family) % 6]
        for entry in entries
        if entry.label != BASE
    }
    for axes, (model, task) in zip(panels, sections, strict=True):
        axes.axvline(100, color=INK, linestyle="--", linewidth=1.2)
        for place, label in enumerate(labels):
            row = summary.rows.get((model, task, TRAINED, label))
            if row is None or row.retention is None:
                continue
            kept = row.retention
            axes.plot(
                [100 * kept.low, 100 * kept.high],
                [place, place],
                color=colour_of[label],
                linewidth=2.4,
            )
            axes.plot([100 * kept.value], [place], "o", color=colour_of[label], markersize=6)
        axes.set_title(f"{task}\n{model}", fontsize=10)
        axes.set_yticks(range(len(labels)), labels, fontsize=9)
        axes.set_ylim(len(labels) - 0.4, -0.6)
        axes.set_xlim(-3, 135)
        axes.grid(axis="x", color="#e6e6e6", linewidth=0.7)
        axes.grid(axis="y", color="#f2f2f2", linewidth=0.7)
        axes.set_axisbelow(True)
        axes.tick_params(axis="y", length=0)
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
    return figure


def cost(summary: Summary, entries: Sequence[Entry]) -> Figure:
    """Seconds to encode and to answer one question, against windows: a panel a family."""
    families = _families(entries)
    sizes = sorted({size for size, _ in summary.costs})
    figure = Figure(figsize=(2.5 * len(families) + 1, 6), layout="constrained")
    figure.suptitle(
        "Seconds a question, medians; above: to encode (nothing cached), below: to answer",
        fontsize=13,
    )
    panels = figure.subplots(2, len(families), sharex=True, sharey="row", squeeze=False)
    for column, (family, labels) in enumerate(families.items()):
        for row, part in enumerate(("encode_s", "answer_s")):
            axes: Axes = panels[row, column]
            _plain(axes)
            for label, colour, marker in [
                (BASE, INK, ""),
                *zip(labels, COLOURS, MARKERS, strict=False),
            ]:
                found = [(s, summary.costs[s, label]) for s in sizes if (s, label) in summary.costs]
                axes.plot(
                    [size for size, _ in found],
                    [getattr(spent, part) for _, spent in found],
                    "--" if label == BASE else "-",
                    color=colour,
                    marker=marker,
                    markersize=4.5,
                    linewidth=1.5,
                    label=label,
                )
            axes.set_yscale("log")
            _windows_axis(axes, sizes)
            if row == 0:
                axes.set_title(family, fontsize=11)
                axes.legend(fontsize=7, loc="upper left", framealpha=0.85)
            else:
                axes.set_xlabel("passages", fontsize=9)
    panels[0, 0].set_ylabel("encode, s")
    panels[1, 0].set_ylabel("answer, s")
    return figure


def links(summary: Summary, model: str, task: str) -> Figure:
    """Accuracy against the share of linked tokens, from plain windows to one sequence."""
    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axes = figure.subplots()
    _plain(axes)
    ends = [summary.rows.get((model, task, SWEEP_PASSAGES, label)) for label in (PLAIN, BASE)]
    shares = [0.0, *LINK_SHARES, 1.0]
    for number, choose in enumerate(("first", "deviation")):
        middle = [
            summary.rows[model, task, SWEEP_PASSAGES, linked(share)[number].label]
            for share in LINK_SHARES
        ]
        found = [row.accuracy for row in (ends[0], *middle, ends[1]) if row is not None]
        if len(found) != len(shares):
            continue
        axes.errorbar(
            [100 * share for share in shares],
            [100 * one.value for one in found],
            yerr=[
                [100 * (one.value - one.low) for one in found],
                [100 * (one.high - one.value) for one in found],
            ],
            color=COLOURS[number],
            marker=MARKERS[number],
            capsize=3,
            linewidth=1.8,
            label={"first": "first tokens of each window", "deviation": "highest key deviation"}[
                choose
            ],
        )
    if ends[1] is not None:
        axes.axhline(90 * ends[1].accuracy.value, color=INK, linestyle=":", linewidth=1.2)
    handles, names = axes.get_legend_handles_labels()
    handles.append(Line2D([], [], color=INK, linestyle=":", linewidth=1.2))
    axes.legend(handles, [*names, "90% of sequential"], fontsize=9, loc="lower right")
    axes.set_xlabel("tokens encoded again in sight of the other windows, percent")
    axes.set_ylabel("right answers, percent")
    axes.set_title(f"{task}, {model}, {SWEEP_PASSAGES} passages", fontsize=11)
    axes.set_ylim(0, 103)
    return figure
