"""The pictures: a panel a family, so that no panel holds more lines than an eye can follow."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter

from benchmarks.judgement.curves import accuracy
from benchmarks.judgement.entries import BASE, LINK_SHARES, PLAIN, Entry, linked
from benchmarks.judgement.panels import (
    COLOURS,
    DPI,
    INK,
    MARKERS,
    families_of,
    legend_below,
    plain,
    windows_axis,
)
from benchmarks.judgement.run import SWEEP_PASSAGES, SWEEP_TASK
from benchmarks.judgement.summary import Summary
from benchmarks.judgement.tables import TRAINED


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
        figure.savefig(paths[-1], dpi=DPI, facecolor="white", metadata={"Software": None})
    return paths


def retention(summary: Summary, entries: Sequence[Entry]) -> Figure:
    """Right answers for each right one of the sequential reader: a panel a task."""
    sections = [one for one in summary.sections if TRAINED in summary.passages(*one)]
    labels = [entry.label for entry in entries if entry.label != BASE]
    figure = Figure(
        figsize=(2.35 * len(sections) + 2.4, 0.3 * len(labels) + 1.6), layout="constrained"
    )
    figure.suptitle(
        f"Right answers in percent of the sequential reader's, {TRAINED} passages", fontsize=13
    )
    panels = figure.subplots(1, len(sections), sharey=True, squeeze=False)[0]
    families = list(families_of(entries))
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
    """Milliseconds to encode and to answer a question, against windows: a panel a family."""
    families = families_of(entries)
    sizes = sorted({size for size, _ in summary.costs})
    figure = Figure(figsize=(2.25 * len(families) + 0.9, 6.8), layout="constrained")
    figure.suptitle(
        "Milliseconds a question, medians; above: to encode (nothing cached), below: to answer",
        fontsize=13,
    )
    panels = figure.subplots(2, len(families), sharex=True, sharey="row", squeeze=False)
    for column, (family, labels) in enumerate(families.items()):
        for row, part in enumerate(("encode_s", "answer_s")):
            axes: Axes = panels[row, column]
            plain(axes)
            for label, colour, marker in [
                (BASE, INK, ""),
                *zip(labels, COLOURS, MARKERS, strict=False),
            ]:
                found = [(s, summary.costs[s, label]) for s in sizes if (s, label) in summary.costs]
                axes.plot(
                    [size for size, _ in found],
                    [1e3 * getattr(spent, part) for _, spent in found],
                    "--" if label == BASE else "-",
                    color=colour,
                    marker=marker,
                    markersize=4.5,
                    linewidth=1.5,
                    label=label,
                )
            axes.set_yscale("log", subs=(2, 5))
            for formatter in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
                formatter(FuncFormatter(lambda y, _: f"{y:g}"))
            windows_axis(axes, sizes)
            if row == 0:
                axes.set_title(family, fontsize=11)
            else:
                axes.set_xlabel("passages", fontsize=9)
                legend_below(axes, 0.22)
    panels[0, 0].set_ylabel("encode, ms")
    panels[1, 0].set_ylabel("answer, ms")
    return figure


def links(summary: Summary, model: str, task: str) -> Figure:
    """Accuracy against the share of linked tokens, from plain windows to one sequence."""
    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axes = figure.subplots()
    plain(axes)
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
            # Lines that coincide stay visible: the later one is smaller.
            markersize=8 - 2.5 * number,
            capsize=3,
            linewidth=3 - 1.5 * number,
            label={"first": "first tokens of each window", "deviation": "highest key deviation"}[
                choose
            ],
        )
    if ends[1] is not None:
        axes.axhline(90 * ends[1].accuracy.value, color=INK, linestyle=":", linewidth=1.2)
    handles, names = axes.get_legend_handles_labels()
    handles.append(Line2D([], [], color=INK, linestyle=":", linewidth=1.2))
    named = [*names, "90% of sequential"]
    figure.legend(handles, named, fontsize=9, loc="outside lower center", ncols=3, frameon=False)
    axes.set_xlabel("tokens encoded again in sight of the other windows, percent")
    axes.set_ylabel("right answers, percent")
    axes.set_title(f"{task}, {model}, {SWEEP_PASSAGES} passages", fontsize=11)
    axes.set_ylim(0, 103)
    return figure
