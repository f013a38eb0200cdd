"""The charts that a run has figures for, and what to run for the others."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from rag_windows.evaluation.report import depths, first_token, kinds
from rag_windows.evaluation.report.drawing import Chart, chart
from rag_windows.evaluation.report.reported import base_label, base_of, deepest
from rag_windows.evaluation.report.sentences import heading, metric_name
from rag_windows.evaluation.report.shown import name, some
from rag_windows.evaluation.summary import ArmSummary, Result, SpeedBin, Summary

_FEWEST = 2
_SIZE = re.compile(r"(\d{1,9}) passages?")
"""A kind by which a task that brings its passages tells how many there are."""


@dataclass(frozen=True, slots=True)
class Absent:
    """A chart that is not there.

    Attributes:
        title: that it would have.
        why: and what to run to get it.
    """

    title: str
    why: str


def pictures(summary: Summary, prefix: str) -> list[Chart | Absent]:
    """Quality by depth, time to the first token, and what is kept by kind, in this order.

    Args:
        summary: of the run.
        prefix: begins the charts' names, which are unique in a page.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    return [
        _depths(summary, prefix),
        _first_token(summary, prefix),
        _kinds(summary, prefix),
    ]


def _depths(summary: Summary, prefix: str) -> Chart | Absent:
    metric = metric_name(summary.metrics[0])
    title = f"{heading(summary.metrics[0])} against the number of windows"
    methods: dict[str, list[depths.Point]] = {}
    for arm in summary.arms:
        methods.setdefault(arm.label, []).extend(_points(arm))
    curves = [
        depths.Curve(method, tuple(sorted(points, key=lambda one: one.windows)))
        for method, points in methods.items()
        if points
    ]
    if not any(len(one.points) >= _FEWEST for one in curves):
        return Absent(
            title,
            "This run has figures for one number of passages only. Run it with several, such as "
            "--top-k 1,5,20 (--shots 4,16 for icl, --passages 1,8,64 for long), to see how quality "
            "changes with the number of windows.",
        )
    base = base_label(summary) or ""
    about = (
        "How good the answers are by how many passages a method reads at most; a passage is a "
        "window, or several if it is long. Bands are 95% intervals. The axis of windows is "
        "logarithmic, and that of quality need not begin at zero."
    )
    return chart(
        f"{prefix}-depths",
        title,
        about,
        lambda width: depths.draw(curves, base, f"{metric}, percent", width),
    )


def _points(arm: ArmSummary) -> Iterator[depths.Point]:
    """One of an arm that reads so many; of a sweep over sizes, one for each of its kinds."""
    if arm.top_k is not None:
        sized = [(arm.top_k, arm.results)]
    else:
        found = [(_SIZE.fullmatch(part.label), part.results) for part in arm.kinds]
        sized = [(int(match[1]), results) for match, results in found if match]
    for size, results in sized:
        for result in results[:1]:
            figure = result.estimate
            if size > 0 and math.isfinite(figure.value):
                ends = (figure.low, figure.high) if figure.bounded else (figure.value,) * 2
                yield depths.Point(size, figure.value, *ends)


def _first_token(summary: Summary, prefix: str) -> Chart | Absent:
    title = "Time to the first token against the length of the context"
    speeds = {}
    for label in dict.fromkeys(arm.label for arm in summary.arms):
        bins = _bins(arm for arm in summary.arms if arm.label == label)
        if first_token.drawable(bins):
            speeds[label] = bins
    if not speeds:
        return Absent(
            title,
            "The time to the first token was not measured. Run with --speed 20, which measures it "
            "cold and warm on 20 questions, in alternating rounds.",
        )
    about = (
        "Medians over contexts of about the same length; both axes are logarithmic. Cold: nothing "
        "was cached. Warm: all that a method can cache was in memory. Where two depths of a method "
        "have contexts of one length, those of the depth with more of them are drawn."
    )
    base = base_label(summary) or ""
    return chart(
        f"{prefix}-speed", title, about, lambda width: first_token.draw(speeds, base, width)
    )


def _bins(arms: Iterable[ArmSummary]) -> list[SpeedBin]:
    """One a range of lengths, that with the most contexts, from short to long."""
    kept: dict[int, SpeedBin] = {}
    for one in (found for arm in arms for found in arm.speed):
        if one.above not in kept or one.n > kept[one.above].n:
            kept[one.above] = one
    return sorted(kept.values(), key=lambda one: one.tokens)


def _kinds(summary: Summary, prefix: str) -> Chart | Absent:
    title = f"{heading(summary.metrics[0])} kept, by kind of question"
    arms = [arm for arm in deepest(summary) if base_of(arm) is not None]
    if not any(arm.kinds for arm in summary.arms):
        return Absent(title, "The questions of this dataset have no kinds.")
    if not arms:
        return Absent(
            title,
            "Nothing is compared. Put sequential among --methods to see what each method keeps.",
        )
    kept = [
        one
        for arm in arms
        for part in arm.kinds
        for result in part.results[:1]
        if (one := _kept(part.label, arm.label, result)) is not None
    ]
    if not kept:
        return Absent(title, "The base has no right answers of any kind, so none can be kept.")
    named = dict.fromkeys(found for arm in arms if (found := base_of(arm)) is not None)
    base = next(iter(named)) if len(named) == 1 else base_label(summary) or "the base"
    depth = {arm.top_k for arm in arms}
    at = (
        f" with {some(depth.pop() or 0, 'passage')}"
        if len(depth) == 1 and None not in depth
        else ""
    )
    about = (
        f"What each method{at} reaches in percent of {name(base)} on the same questions, with 95% "
        "intervals; n counts the questions of a kind. A question with right answers of several "
        "kinds counts in each."
    )
    return chart(f"{prefix}-kinds", title, about, lambda width: kinds.draw(kept, base, width))


def _kept(kind: str, method: str, result: Result) -> kinds.Kept | None:
    if result.against is None or not math.isfinite(result.against.retention.value):
        return None
    kept = result.against.retention
    low, high = (kept.low, kept.high) if kept.bounded else (kept.value, kept.value)
    return kinds.Kept(kind, method, kept.value, low, high, result.n)
