"""The tables of a report, for HTML and Markdown alike."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rag_windows.evaluation.report.sentences import heading, metric_name, with_interval
from rag_windows.evaluation.report.shown import chance, name, number
from rag_windows.evaluation.summary import ArmSummary, Part, Retrieval, Summary

UNBOUNDED = "There are no intervals, which need at least two conversations."
_LONG = 8
"""Rows above which a table of parts is folded."""


@dataclass(frozen=True, slots=True)
class Table:
    """Plain text in rows; the first column names them, the others hold figures.

    Attributes:
        caption: what it shows.
        head: names of the columns.
        rows: as wide as the head.
        note: below it; empty for none.
        folded: whether a page may fold it away.
        words: numbers of the columns that hold words, from 0.
    """

    caption: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""
    folded: bool = False
    words: tuple[int, ...] = (0,)


def overview(runs: Sequence[tuple[str, Summary]]) -> Table:
    """The main metric of all arms of several runs.

    Args:
        runs: titles with summaries.
    """
    rows = []
    for title, summary in runs:
        depths = {one.top_k: one for one in summary.retrieval}
        for arm in summary.arms:
            for result in arm.results[:1]:
                found = _retrieved(depths.get(arm.top_k))[0]
                metric, shown = metric_name(result.metric), with_interval(result.estimate)
                rows.append((name(title), name(arm.name), metric, shown, found, f"{result.n:,}"))
    head = ("run", "arm", "metric", "value, %", "evidence found, % of it", "n")
    note = "Side by side only: arms are tested against each other inside a run, not between runs."
    return Table("All runs", head, tuple(rows), note, words=(0, 1, 2))


def quality(summary: Summary) -> Table:
    """Arms by metrics, with intervals, beside the retrieval of their depth."""
    depths = {one.top_k: one for one in summary.retrieval}
    beside = ("evidence found, % of it", "questions with some found, %") if depths else ()
    rows = []
    for arm in summary.arms:
        figures = tuple(with_interval(one.estimate) for one in arm.results)
        found = _retrieved(depths.get(arm.top_k)) if depths else ()
        rows.append((name(arm.name), *figures, *found))
    counts = {one.n for arm in summary.arms for one in arm.results}
    bounded = any(one.estimate.bounded for arm in summary.arms for one in arm.results)
    note = "Percent, with 95% intervals." if bounded else f"Percent. {UNBOUNDED}"
    if len(counts) == 1:
        note += f" n = {counts.pop():,} questions for every metric."
    if depths:
        n = max(one.n for one in summary.retrieval)
        note += (
            f" The last two columns are the retriever's, over the {n:,} questions that name "
            "evidence: what no passage holds, no reader can answer from passages."
        )
    head = ("arm", *(metric_name(one) for one in summary.metrics), *beside)
    return Table("Quality of answers", head, tuple(rows), note)


def _retrieved(found: Retrieval | None) -> tuple[str, str]:
    return ("–", "–") if found is None else (with_interval(found.recall), with_interval(found.hit))


def comparisons(summary: Summary) -> list[Table]:
    """A table a metric: every arm against its base."""
    made = []
    for place, metric in enumerate(summary.metrics):
        rows = [row for arm in summary.arms if (row := _compared(arm, metric)) is not None]
        if rows:
            made.append(
                Table(
                    f"{heading(metric)}: each arm against its base",
                    (
                        "arm",
                        "value, %",
                        "difference, points",
                        "kept, %",
                        "p",
                        "p (Holm)",
                        "n",
                        "base",
                    ),
                    tuple(rows),
                    folded=place > 0,
                    words=(0, 7),
                )
            )
    return made


def _compared(arm: ArmSummary, metric: str) -> tuple[str, ...] | None:
    result = next((one for one in arm.results if one.metric == metric), None)
    if result is None or result.against is None:
        return None
    against = result.against
    return (
        name(arm.name),
        number(result.estimate.value),
        with_interval(against.difference, signed=True),
        with_interval(against.retention),
        chance(against.p),
        chance(against.p_holm),
        f"{result.n:,}",
        name(against.base),
    )


def kinds(summary: Summary) -> Table | None:
    """The main metric by kind of question; None where there are no kinds."""
    return _parts(summary, [arm.kinds for arm in summary.arms], "by kind of question", "kind")


def retrieval(summary: Summary) -> Table | None:
    """The main metric where retrieval found evidence, and where it did not."""
    return _parts(
        summary,
        [arm.retrieval for arm in summary.arms],
        "by whether the passages held evidence",
        "evidence",
    )


def _parts(
    summary: Summary, parts: Sequence[Sequence[Part]], caption: str, column: str
) -> Table | None:
    if not any(parts) or not summary.metrics:
        return None
    metric = summary.metrics[0]
    labels = dict.fromkeys(part.label for found in parts for part in found)
    rows = []
    for label in labels:
        for arm, found in zip(summary.arms, parts, strict=True):
            part = next((one for one in found if one.label == label), None)
            result = (
                next((one for one in part.results if one.metric == metric), None) if part else None
            )
            if result is None:
                continue
            kept = "–" if result.against is None else with_interval(result.against.retention)
            shown = with_interval(result.estimate)
            rows.append((name(label), name(arm.name), shown, kept, f"{result.n:,}"))
    head = (column, "arm", f"{metric_name(metric)}, %", "kept of the base, %", "n")
    note = "Not tested: the parts are small, and there are many of them."
    title = f"{heading(metric)} {caption}"
    return Table(title, head, tuple(rows), note, folded=len(rows) > _LONG, words=(0, 1))


def work(summary: Summary) -> Table:
    """What each arm computed, and how long it took."""
    rows = []
    seconds: tuple[str, ...]
    for arm in summary.arms:
        counted, times = arm.counters, arm.times
        seconds = ("–", "–", "–")
        if times is not None:
            seconds = tuple(number(one, 3) for one in (times.encode_s, times.ttft_s, times.total_s))
        amounts = (
            counted.windows_encoded,
            counted.windows_reused,
            counted.prompt_tokens,
            counted.cached_tokens,
            counted.completion_tokens,
            counted.left_out_passages,
            counted.unfinished,
            counted.errors,
        )
        rows.append((name(arm.name), *(f"{one:,}" for one in amounts), *seconds))
    head = (
        "arm",
        "windows encoded",
        "windows reused",
        "tokens read",
        "of them cached",
        "tokens written",
        "passages left out",
        "answers cut off",
        "errors",
        "encoding, s",
        "first token, s",
        "answer, s",
    )
    note = (
        "Sums over the run; seconds are medians a question as they came in the run. An arm finds "
        "in memory what an earlier arm has encoded, so these seconds depend on the order of the "
        "arms; cold and warm times that can be compared are those of --speed."
    )
    return Table("Work", head, tuple(rows), note, folded=True)


def speed(summary: Summary) -> Table | None:
    """Time to the first token by length of the context; None where it was not measured."""
    rows = [
        (
            name(arm.name),
            f"{number(one.above, 0)} to {number(one.up_to, 0)}",
            number(one.tokens, 0),
            number(one.cold_s, 3),
            number(one.warm_s, 3),
            "–" if not one.warm_s > 0 else f"{number(one.cold_s / one.warm_s)}×",
            f"{one.n:,}",
        )
        for arm in summary.arms
        for one in arm.speed
    ]
    if not rows:
        return None
    head = ("arm", "tokens of context", "median", "cold, s", "warm, s", "cold / warm", "contexts")
    return Table(
        "Time to the first token", head, tuple(rows), "Medians.", folded=True, words=(0, 1)
    )


def all_of(summary: Summary) -> Iterable[Table]:
    """Every table, in the order of a report."""
    yield quality(summary)
    yield from comparisons(summary)
    for made in (kinds(summary), retrieval(summary), speed(summary)):
        if made is not None:
            yield made
    yield work(summary)
