"""The charts of a report: one matplotlib SVG each, which takes its colours from the page."""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from rag_windows.errors import MissingExtraError, missing
from rag_windows.evaluation.report.tables import deepest
from rag_windows.evaluation.report.text import heading, metric_name, name
from rag_windows.evaluation.statistics import Estimate
from rag_windows.evaluation.summary import ArmSummary, SpeedBin, Summary
from rag_windows.prompt.visible_text import one_line

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH = 760
"""Of every chart, in CSS pixels; on a phone it is moved sideways, since text doesn't shrink."""

INK, SOFT, GRID, GROUND = "#010101", "#020202", "#030303", "#040404"
_LINES = ("#0101f1", "#0101f2", "#0101f3", "#0101f4", "#0101f5", "#0101f6")
"""Stand-ins for matplotlib; the page gives them their colours by its style sheet."""

VARIABLES = {
    **{INK: "ink", SOFT: "soft", GRID: "grid", GROUND: "ground"},
    **{colour: f"line{place}" for place, colour in enumerate(_LINES, start=1)},
}
_MARKERS = ("s", "^", "D", "v", "P", "X", "<", "p", "*", ">", "h", "d")
_DASHES: tuple[Any, ...] = ("-", (0, (6, 2)), (0, (2, 1.5)), (0, (7, 2, 1.5, 2)), (0, (4, 1.5)))

_HIGHEST = 250.0
"""Percent kept, beyond which an interval is cut off."""

_SIZE = re.compile(r"(\d{1,9}) passages?")
"""A kind by which a task that brings its passages tells how many there are."""

_NAMESPACE = re.compile(r"\{[^}]*\}")
_REFERENCE = re.compile(r"url\(#([\w.-]+)\)|^#([\w.-]+)$")
_LINK = re.compile(r"#([\w.-]+)")
_COLOUR = re.compile("|".join(VARIABLES))


@dataclass(frozen=True, slots=True)
class Chart:
    """A picture, or why there is none.

    Attributes:
        title: above it.
        about: below it: what is drawn, and how it is read; or what to run to get it.
        name: id of the picture, unique in the page.
        svg: the picture; empty where it is not drawn.
    """

    title: str
    about: str
    name: str = ""
    svg: str = ""


def charts(summary: Summary, prefix: str) -> list[Chart]:
    """Quality by depth, time to the first token, and what is kept by kind, in this order.

    Args:
        summary: of the run.
        prefix: begins the charts' ids.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    with _settings():
        return [
            _depths(summary, f"{prefix}-depths"),
            _first_token(summary, f"{prefix}-speed"),
            _kinds(summary, f"{prefix}-kinds"),
        ]


@contextmanager
def _settings() -> Iterator[None]:
    try:
        import matplotlib as mpl
    except ImportError as error:
        what = "The report with its charts"
        raise MissingExtraError(missing(what, "matplotlib", "eval")) from error
    with mpl.rc_context(
        {
            "axes.edgecolor": SOFT,
            "axes.grid": True,
            "axes.axisbelow": True,
            "axes.labelcolor": INK,
            "axes.spines.right": False,
            "axes.spines.top": False,
            "axes.titlecolor": INK,
            "axes.titlelocation": "left",
            "axes.titlesize": 14,
            "font.family": "DejaVu Sans",
            "font.size": 14.0,
            "grid.color": GRID,
            "legend.frameon": False,
            "legend.handlelength": 3.2,
            "svg.fonttype": "none",
            "svg.hashsalt": "rag-windows",
            "text.color": INK,
            # A "$" in a dataset's own words starts no formula.
            "text.parse_math": False,
            "xtick.color": SOFT,
            "xtick.labelcolor": INK,
            "ytick.color": SOFT,
            "ytick.labelcolor": INK,
        }
    ):
        yield


def short(text: str, longest: int = 30) -> str:
    """A name of others on one line; a long one ends in an ellipsis, and is whole in the tables."""
    shown = one_line(text)
    # matplotlib leaves labels that begin with "_" out of a legend.
    shown = "\u200b" + shown if shown.startswith("_") else shown
    return shown if len(shown) <= longest else shown[: longest - 1] + "…"


def _looks(methods: Sequence[str], base: str | None) -> dict[str, dict[str, Any]]:
    """How each method is drawn: the base in ink, and no two of twelve others alike."""
    found: dict[str, dict[str, Any]] = {}
    for place, method in enumerate(one for one in methods if one != base):
        found[method] = {
            "color": _LINES[place % len(_LINES)],
            "marker": _MARKERS[place % len(_MARKERS)],
            "linestyle": _DASHES[place % len(_DASHES)],
        }
    if base is not None:
        found[base] = {"color": INK, "marker": "o", "linestyle": "-"}
    return found


def _figure(height: float, labels: Sequence[str]) -> Figure:
    """An empty figure with room for a legend of these labels below it."""
    from matplotlib.figure import Figure

    rows = -(-len(labels) // _columns(labels))
    # SVG's unit is matplotlib's point, of which 72 make an inch.
    return Figure(figsize=(WIDTH / 72, (height + 24 * rows) / 72), layout="constrained")


def _columns(labels: Sequence[str]) -> int:
    longest = max(len(short(one)) for one in labels)
    return max(1, min(len(labels), int(WIDTH / (longest * 8.5 + 70))))


def _line(
    axes: Axes, look: dict[str, Any], xs: Sequence[float], ys: Sequence[float], **more: Any
) -> None:
    edge: dict[str, Any] = {"markeredgecolor": GROUND, "markeredgewidth": 0.8, "markersize": 8}
    axes.plot(xs, ys, **look, **edge, linewidth=2.2, **more)


def _drawn(figure: Figure, axes: Axes, labels: Sequence[str], chart: Chart) -> Chart:
    handles, found = axes.get_legend_handles_labels()
    figure.legend(handles, found, loc="outside lower left", ncols=_columns(labels))
    return Chart(chart.title, chart.about, chart.name, _inline(figure, chart))


def _base_label(summary: Summary) -> str | None:
    named = {arm.name: arm.label for arm in summary.arms}
    return next((named[arm.base] for arm in summary.arms if arm.base in named), None)


def _depths(summary: Summary, anchor: str) -> Chart:
    title = f"{heading(summary.metrics[0])} against the number of windows"
    curves: dict[str, list[tuple[float, Estimate]]] = {}
    for arm in summary.arms:
        if points := list(_points(arm)):
            curves.setdefault(arm.label, []).extend(points)
    if not any(len(points) > 1 for points in curves.values()):
        return Chart(
            title,
            "This run has figures for one number of passages only. Run it with several, such as "
            "--top-k 1,5,20 (--shots 4,16 for icl, --passages 1,8,64 for long), to see how quality "
            "changes with the number of windows.",
        )
    about = (
        "How good the answers are by how many passages a method reads at most; a passage is a "
        "window, or several if it is long. Bands are 95% intervals. The axis of windows is "
        "logarithmic, and that of quality need not begin at zero."
    )
    figure = _figure(340, list(curves))
    axes = figure.subplots()
    looks, ends = _looks(list(curves), _base_label(summary)), []
    for method, points in curves.items():
        points.sort(key=lambda one: one[0])
        sizes = [size for size, _ in points]
        low, high = zip(*(_ends(one) for _, one in points), strict=True)
        ends += [*low, *high]
        axes.fill_between(sizes, low, high, color=looks[method]["color"], alpha=0.13, linewidth=0)
        _line(axes, looks[method], sizes, [one.value for _, one in points], label=short(method))
    axes.set_xscale("log", base=2)
    every = sorted({size for points in curves.values() for size, _ in points})
    axes.set_xticks(every, [f"{one:,.0f}" for one in every])
    axes.minorticks_off()
    axes.set_xlabel("passages or demonstrations")
    axes.set_ylabel(f"{metric_name(summary.metrics[0])}, percent")
    # Five points at least, so that trifles look like trifles; and room for a line at 0 or 100.
    room = max(0.06 * (max(ends) - min(ends)), (5 - max(ends) + min(ends)) / 2)
    axes.set_ylim(max(min(ends) - room, -0.3), min(max(ends) + room, 100.3))
    return _drawn(figure, axes, list(curves), Chart(title, about, anchor))


def _points(arm: ArmSummary) -> Iterator[tuple[float, Estimate]]:
    """One of an arm that reads so many; of a sweep over sizes, one for each of its kinds."""
    if arm.top_k is not None:
        sized = [(arm.top_k, arm.results)]
    else:
        found = [(_SIZE.fullmatch(part.label), part.results) for part in arm.kinds]
        sized = [(int(match[1]), results) for match, results in found if match]
    for size, results in sized:
        for result in results[:1]:
            # No demonstrations have no place on a logarithmic axis.
            if size > 0 and math.isfinite(result.estimate.value):
                yield size, result.estimate


def _ends(one: Estimate) -> tuple[float, float]:
    return (one.low, one.high) if one.bounded else (one.value, one.value)


def _first_token(summary: Summary, anchor: str) -> Chart:
    from matplotlib.ticker import EngFormatter, LogLocator, NullLocator

    title = "Time to the first token against the length of the context"
    speeds = {}
    for label in dict.fromkeys(arm.label for arm in summary.arms):
        bins = _bins(arm for arm in summary.arms if arm.label == label)
        if any(_positive(one.cold_s) or _positive(one.warm_s) for one in bins):
            speeds[label] = bins
    if not speeds:
        return Chart(
            title,
            "The time to the first token was not measured. Run with --speed 20, which measures it "
            "cold and warm on 20 questions, in alternating rounds.",
        )
    about = (
        "Medians over contexts of about the same length; both axes are logarithmic. Cold: nothing "
        "was cached. Warm: all that a method can cache was in memory. Where two depths of a method "
        "have contexts of one length, those of the depth with more of them are drawn."
    )
    figure = _figure(340, list(speeds))
    panels = figure.subplots(1, 2, sharex=True, sharey=True)
    looks = _looks(list(speeds), _base_label(summary))
    drawn: list[tuple[float, float]] = []
    for axes, field, words in zip(
        panels, ("cold_s", "warm_s"), ("cold: nothing cached", "warm: all in memory"), strict=True
    ):
        axes.set_title(words)
        axes.set_xlabel("tokens of context")
        for method, bins in speeds.items():
            points = [(one.tokens, getattr(one, field)) for one in bins]
            points = [one for one in points if all(map(_positive, one))]
            drawn += points
            xs, ys = [x for x, _ in points], [y for _, y in points]
            _line(axes, looks[method], xs, ys, label=short(method))
    panels[0].set_ylabel("time to the first token")
    # Marks at 1, 2 and 5 of each power of ten; at the powers alone where the axis is long.
    for axis, unit, values in (
        (panels[0].xaxis, "", [x for x, _ in drawn]),
        (panels[0].yaxis, "s", [y for _, y in drawn]),
    ):
        low, high = min(values) / 1.6, max(values) * 1.6
        scale, limit = (
            (axis.axes.set_yscale, axis.axes.set_ylim)
            if unit
            else (axis.axes.set_xscale, axis.axes.set_xlim)
        )
        scale("log")
        limit(low, high)
        axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high / low < 100 else (1,)))
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(EngFormatter(unit))
    return _drawn(figure, panels[0], list(speeds), Chart(title, about, anchor))


def _positive(value: float) -> bool:
    return math.isfinite(value) and value > 0


def _bins(arms: Iterable[ArmSummary]) -> list[SpeedBin]:
    """One a range of lengths, that with the most contexts, from short to long."""
    kept: dict[int, SpeedBin] = {}
    for one in (found for arm in arms for found in arm.speed):
        if one.above not in kept or one.n > kept[one.above].n:
            kept[one.above] = one
    return sorted(kept.values(), key=lambda one: one.tokens)


def _kinds(summary: Summary, anchor: str) -> Chart:
    title = f"{heading(summary.metrics[0])} kept, by kind of question"
    arms = [arm for arm in deepest(summary) if arm.base is not None]
    if not any(arm.kinds for arm in summary.arms):
        return Chart(title, "The questions of this dataset have no kinds.")
    if not arms:
        return Chart(
            title,
            "Nothing is compared. Put sequential among --methods to see what each method keeps.",
        )
    kept: dict[str, dict[str, tuple[Estimate, int]]] = {}
    for arm in arms:
        for part in arm.kinds:
            for one in part.results[:1]:
                if one.against is not None and math.isfinite(one.against.retention.value):
                    kept.setdefault(part.label, {})[arm.label] = one.against.retention, one.n
    if not kept:
        return Chart(title, "The base has no right answers of any kind, so none can be kept.")
    bases = {arm.base for arm in arms}
    base = bases.pop() if len(bases) == 1 else None
    base = base or _base_label(summary) or "the base"
    about = (
        f"What each method reaches in percent of {name(base)} on the same questions, of each its "
        "arm with the most passages, with 95% intervals; n counts the questions of a kind. A "
        "question with right answers of several kinds counts in each."
    )
    methods = [arm.label for arm in arms]
    step = 1 / (len(methods) + 1)
    figure = _figure(80 + len(kept) * (26 + 20 * len(methods)), [*methods, base])
    axes = figure.subplots()
    looks, ends = _looks(methods, None), [90.0, 110.0]
    for order, method in enumerate(methods):
        rows = [
            (place - 0.5 + step * (order + 1), found[method][0])
            for place, found in enumerate(kept.values())
            if method in found
        ]
        values = [one.value for _, one in rows]
        low, high = zip(*(_ends(one) for _, one in rows), strict=True) if rows else ((), ())
        ends += [*low, *high]
        axes.errorbar(
            values,
            [place for place, _ in rows],
            xerr=[
                [value - one for value, one in zip(values, low, strict=True)],
                [one - value for value, one in zip(values, high, strict=True)],
            ],
            fmt=looks[method]["marker"],
            color=looks[method]["color"],
            markersize=7.5,
            linewidth=2,
            label=short(method),
        )
    axes.axvline(100, color=INK, linestyle=(0, (5, 3)), linewidth=1.4, zorder=1, label=short(base))
    axes.set_yticks(range(len(kept)), [_counted(kind, found) for kind, found in kept.items()])
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="y", visible=False)
    axes.set_ylim(len(kept) - 0.5, -0.5)
    axes.set_xlim(min(ends) - 2, min(_HIGHEST, max(ends) + 2))
    axes.set_xlabel(f"percent of {short(base)}")
    return _drawn(figure, axes, [*methods, base], Chart(title, about, anchor))


def _counted(kind: str, found: dict[str, tuple[Estimate, int]]) -> str:
    counts = [count for _, count in found.values()]
    ends = f"{min(counts):,}", f"{max(counts):,}"
    return f"{short(kind, 26)}\nn = {' to '.join(dict.fromkeys(ends))}"


def _inline(figure: Figure, chart: Chart) -> str:
    """The figure as an ``<svg>`` element that scales and takes its colours from the page.

    Returns:
        XML that holds no script, no style sheet and no address; texts are escaped.
    """
    written = io.StringIO()
    metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with warnings.catch_warnings():
        # The reader's own fonts draw the text; matplotlib's lacks most scripts, and measures only.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure.savefig(written, format="svg", transparent=True, metadata=metadata)
    root = ElementTree.fromstring(written.getvalue())  # noqa: S314 - matplotlib wrote it just now
    values = [value for element in root.iter() for value in element.attrib.values()]
    named = {one[1] or one[2] for value in values for one in _REFERENCE.finditer(value)}
    _clean(root, chart.name, named)
    for attribute in ("width", "height", "version"):
        root.attrib.pop(attribute, None)
    root.attrib.update({"role": "img", "aria-labelledby": f"{chart.name}-title {chart.name}-about"})
    texts = (("title", "title", chart.title), ("desc", "about", chart.about))
    for place, (tag, key, text) in enumerate(texts):
        element = ElementTree.Element(tag, {"id": f"{chart.name}-{key}"})
        element.text = text
        root.insert(place, element)
    return ElementTree.tostring(root, encoding="unicode")


def _clean(element: ElementTree.Element, anchor: str, named: set[str]) -> None:
    """Drop what would reach beyond the figure: style sheets, metadata, ids of nobody's use."""
    # HTML knows the elements of an <svg> without their namespace.
    element.tag = _NAMESPACE.sub("", element.tag)
    for key, value in list(element.attrib.items()):
        del element.attrib[key]
        plain = _NAMESPACE.sub("", key)
        if plain == "id":
            if value in named:
                element.attrib["id"] = f"{anchor}-{value}"
            continue
        if _REFERENCE.search(value):
            value = _LINK.sub(lambda found: f"#{anchor}-{found[1]}", value)
        element.attrib[plain] = _COLOUR.sub(lambda found: f"var(--{VARIABLES[found[0]]})", value)
    for child in list(element):
        if _NAMESPACE.sub("", child.tag) in ("style", "metadata"):
            element.remove(child)
            continue
        _clean(child, anchor, named)
        if child.tag == "defs" and not len(child):
            element.remove(child)
