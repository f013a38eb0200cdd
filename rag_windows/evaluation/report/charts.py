"""The charts of a report: one matplotlib SVG each, which takes its colours from the page."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Sequence
from importlib.resources import as_file, files
from itertools import cycle
from typing import TYPE_CHECKING, Any

import pandas as pd

from rag_windows.errors import MissingExtraError, missing
from rag_windows.evaluation.report.tables import deepest, metric_name, name
from rag_windows.evaluation.summary import ArmSummary, Estimate, SpeedBin, Summary

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDTH = 760
"""Of every chart, in CSS pixels; on a phone it is moved sideways, since text doesn't shrink."""

INK = "#010101"
COLOURS = {INK: "ink", "#020202": "soft", "#030303": "grid", "#040404": "ground"} | {
    f"#0101f{place}": f"line{place}" for place in range(1, 7)
}
"""Stand-ins in charts.mplstyle, and variables of the page that hold the colours of its scheme."""

_HIGHEST = 250.0
"""Percent kept, beyond which an interval is cut off."""


def charts(summary: Summary, salt: str) -> dict[str, str]:
    """Quality by number of windows, time to the first token, and what is kept by kind: as SVG.

    One that can't be drawn of this run is "". The salt keeps the ids of a page's charts apart.
    """
    try:
        import matplotlib as mpl
    except ImportError as error:
        what = "The report with its charts"
        raise MissingExtraError(missing(what, "matplotlib", "eval")) from error
    style = files("rag_windows.evaluation.report") / "templates" / "charts.mplstyle"
    made = {}
    for kind, draw in (("windows", _windows), ("speed", _first_token), ("kinds", _kinds)):
        with as_file(style) as path, mpl.rc_context({"svg.hashsalt": salt + kind}, fname=path):
            bases = {arm.base for arm in summary.arms}
            # The base comes first, and is drawn in ink.
            arms = sorted(summary.arms, key=lambda arm: arm.name not in bases)
            labels = dict.fromkeys(arm.label for arm in arms)
            styles = cycle(mpl.rcParams["axes.prop_cycle"])
            looks = {label: {**next(styles), "label": _short(label)} for label in labels}
            figure = draw(summary, looks)
            made[kind] = "" if figure is None else _svg(figure)
    return made


def _short(text: str, longest: int = 30) -> str:
    # matplotlib leaves labels that begin with "_" out of a legend.
    return name("\u200b" + text if text.startswith("_") else text, longest)


def _figure(height: float, labels: int) -> Figure:
    """An empty figure with room for a legend of so many labels."""
    from matplotlib.figure import Figure

    # SVG's unit is matplotlib's point, of which 72 make an inch.
    size = (WIDTH / 72, (height + 24 * -(-labels // 2)) / 72)
    return Figure(figsize=size, layout="constrained")


def _windows(summary: Summary, looks: dict[str, Any]) -> Figure | None:
    curves: dict[str, dict[int, Estimate]] = {}
    for arm in summary.arms:
        curves.setdefault(arm.label, {}).update(_points(arm))
    if all(len(points) < 2 for points in curves.values()):
        return None
    figure = _figure(340, len(curves))
    axes = figure.subplots()
    for label, points in curves.items():
        sizes = sorted(points)
        ends, colour = _ends([points[size] for size in sizes]), looks[label]["color"]
        axes.fill_between(sizes, ends["low"], ends["high"], color=colour, alpha=0.13, linewidth=0)
        axes.plot(sizes, ends["value"], **looks[label])
    axes.set_xscale("log", base=2)
    sizes = sorted({size for points in curves.values() for size in points})
    axes.set_xticks(sizes, [f"{one:,}" for one in sizes])
    axes.minorticks_off()
    axes.set_xlabel("passages or demonstrations")
    axes.set_ylabel(f"{metric_name(summary.metrics[0])}, percent")
    low, high = axes.get_ylim()
    # Five points at least, so that trifles look like trifles.
    room = max(0.0, 5 - (high - low)) / 2
    axes.set_ylim(max(low - room, -0.3), min(high + room, 100.3))
    return figure


def _points(arm: ArmSummary) -> dict[int, Estimate]:
    """By number of passages: of an arm that reads so many, or of a sweep's kinds "8 passages"."""
    if arm.top_k is None:
        sized = [(re.fullmatch(r"(\d+) passages?", one.label), one.results) for one in arm.kinds]
        return {int(match[1]): results[0].estimate for match, results in sized if match}
    # No demonstrations have no place on a logarithmic axis.
    return {arm.top_k: arm.results[0].estimate} if arm.top_k and arm.results else {}


def _first_token(summary: Summary, looks: dict[str, Any]) -> Figure | None:
    from matplotlib.ticker import EngFormatter, LogLocator, NullLocator

    speeds: dict[str, list[SpeedBin]] = {}
    for arm in summary.arms:
        speeds.setdefault(arm.label, []).extend(arm.speed)
    if not any(speeds.values()):
        return None
    figure = _figure(340, len(speeds))
    panels = figure.subplots(1, 2, sharex=True, sharey=True)
    titles = ("cold: nothing cached", "warm: all in memory")
    for axes, field, title in zip(panels, ("cold_s", "warm_s"), titles, strict=True):
        axes.set_title(title)
        axes.set_xlabel("tokens of context")
        for label, bins in speeds.items():
            points = {one.tokens: getattr(one, field) for one in bins}
            lengths = sorted(points)
            axes.loglog(lengths, [points[one] for one in lengths], **looks[label])
    panels[0].set_ylabel("time to the first token")
    for axis, unit in ((panels[0].xaxis, ""), (panels[0].yaxis, "s")):
        low, high = axis.get_view_interval()
        # Marks at 1, 2 and 5 of each power of ten; at the powers alone where the axis is long.
        axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high / low < 100 else (1,)))
        axis.set_major_formatter(EngFormatter(unit))
        axis.set_minor_locator(NullLocator())
    return figure


def _kinds(summary: Summary, looks: dict[str, Any]) -> Figure | None:
    arms = [arm for arm in deepest(summary) if arm.base is not None and arm.kinds]
    if not arms:
        return None
    bases, kinds = {arm.base for arm in arms}, arms[0].kinds
    base = _short(str(bases.pop())) if len(bases) == 1 else "the base"
    figure = _figure(80 + len(kinds) * (26 + 20 * len(arms)), len(arms) + 1)
    axes = figure.subplots()
    for order, arm in enumerate(arms, start=1):
        results = [part.results[0].against for part in arm.kinds]
        kept = _ends([one.retention for one in results if one is not None])
        height = kept.index - 0.5 + order / (len(arms) + 1)
        reach = [kept["value"] - kept["low"], kept["high"] - kept["value"]]
        axes.errorbar(kept["value"], height, xerr=reach, **looks[arm.label] | {"linestyle": ""})
    axes.axvline(100, color=INK, linestyle=(0, (5, 3)), linewidth=1.4, zorder=1, label=base)
    names = [f"{_short(part.label, 26)}\nn = {part.examples:,}" for part in kinds]
    axes.set_yticks(range(len(kinds)), names)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="y", visible=False)
    axes.set_ylim(len(kinds) - 0.5, -0.5)
    low, high = axes.get_xlim()
    axes.set_xlim(min(low, 88), min(max(high, 112), _HIGHEST))
    axes.set_xlabel(f"percent of {base}")
    return figure


def _ends(estimates: Sequence[Estimate]) -> pd.DataFrame:
    rows = [(one.value, one.low, one.high) for one in estimates]
    return pd.DataFrame(rows, columns=["value", "low", "high"])


def _svg(figure: Figure) -> str:
    """The figure as an element of an HTML page; it holds no script, style sheet or address."""
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower left", ncols=2)
    written = io.StringIO()
    with warnings.catch_warnings():
        # The reader's own fonts draw the text; matplotlib's lacks most scripts, and measures only.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure.savefig(written, format="svg", transparent=True, metadata={"Date": None})
    # Behind metadata and matplotlib's own style sheet. Groups need no ids.
    drawing = written.getvalue().partition('<g id="figure_1">')[2]
    drawing = re.sub(r' id="[\w.]+_\d+"', "", drawing).replace("xlink:href", "href")
    for stand_in, variable in COLOURS.items():
        drawing = drawing.replace(stand_in, f"var(--{variable})")
    size = " ".join(f"{72 * side:g}" for side in figure.get_size_inches())
    return f'<svg viewBox="0 0 {size}"><g>{drawing}'
