"""What a run found, in tables and sentences: for the terminal, for Markdown and for HTML."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pandas as pd

from rag_windows.evaluation.report.text import (
    chance,
    escaped,
    heading,
    interval,
    listed,
    metric_name,
    name,
    number,
    some,
    with_interval,
)
from rag_windows.evaluation.summary import Against, ArmSummary, Part, Result, Summary
from rag_windows.evaluation.task import Example

LEVEL = 0.05
"""Of p after Holm's correction: what is called shown."""

_LONG = 8
"""Rows above which a table of parts is folded."""


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """Plain text in rows; the first column names them, the others hold figures.

    Attributes:
        caption: what it shows.
        frame: strings.
        note: below it; empty for none.
        folded: whether a page may fold it away.
        words: numbers of the columns that hold words, from 0.
    """

    caption: str
    frame: pd.DataFrame
    note: str = ""
    folded: bool = False
    words: tuple[int, ...] = (0,)

    def markdown(self) -> str:
        """Aligned where it is read as plain text, too; names of others are escaped."""
        frame = self.frame.map(escaped).rename(columns=escaped)
        sides = ["left" if n in self.words else "right" for n in range(frame.shape[1])]
        return str(frame.to_markdown(index=False, disable_numparse=True, colalign=sides))


def _frame(head: Sequence[str], rows: Sequence[Sequence[str]]) -> pd.DataFrame:
    return pd.DataFrame(rows, columns=list(head), dtype=str)


def overview(runs: Sequence[tuple[str, Summary]]) -> Table:
    """The main metric of all arms of several runs, with their titles."""
    rows = []
    for title, summary in runs:
        found = {one.top_k: with_interval(one.recall) for one in summary.retrieval}
        for arm in summary.arms:
            for one in arm.results[:1]:
                figures = with_interval(one.estimate), found.get(arm.top_k, "–"), f"{one.n:,}"
                rows.append((name(title), name(arm.name), metric_name(one.metric), *figures))
    head = ("run", "arm", "metric", "value, %", "evidence found, % of it", "n")
    note = "Side by side only: arms are tested against each other inside a run, not between runs."
    return Table("All runs", _frame(head, rows), note, words=(0, 1, 2))


def tables(summary: Summary) -> Iterator[Table]:
    """Every table, in the order of a report."""
    yield _quality(summary)
    for place, metric in enumerate(summary.metrics):
        pairs = [(arm, arm.results[place]) for arm in summary.arms if arm.results]
        rows = [_compared(arm, one, one.against) for arm, one in pairs if one.against]
        if rows:
            head = (
                "arm",
                "value, %",
                "difference, points",
                "kept, %",
                "p",
                "p (Holm)",
                "n",
                "base",
            )
            caption = f"{heading(metric)}: each arm against its base"
            yield Table(caption, _frame(head, rows), folded=place > 0, words=(0, 7))
    kinds = [arm.kinds for arm in summary.arms]
    retrieval = [arm.retrieval for arm in summary.arms]
    yield from _parts(summary, kinds, "by kind of question", "kind")
    yield from _parts(summary, retrieval, "by whether the passages held evidence", "evidence")
    yield from _speed(summary)
    yield _work(summary)


def _quality(summary: Summary) -> Table:
    depths = {one.top_k: one for one in summary.retrieval}
    rows = []
    for arm in summary.arms:
        found = depths.get(arm.top_k)
        both = ["–", "–"] if found is None else list(map(with_interval, (found.recall, found.hit)))
        figures = [with_interval(one.estimate) for one in arm.results]
        rows.append([name(arm.name), *figures, *(both if depths else ())])
    bounded = any(one.estimate.bounded for arm in summary.arms for one in arm.results)
    note = "Percent, with 95% intervals."
    if not bounded:
        note = "Percent. There are no intervals, which need at least two conversations."
    counts = {one.n for arm in summary.arms for one in arm.results}
    if len(counts) == 1:
        note += f" n = {counts.pop():,} questions for every metric."
    if depths:
        note += (
            " The last two columns are the retriever's, over the "
            f"{max(one.n for one in depths.values()):,} questions that name evidence: what no "
            "passage holds, no reader can answer from passages."
        )
    metrics = [metric_name(one) for one in summary.metrics] if summary.compared else []
    beside = ("evidence found, % of it", "questions with some found, %") if depths else ()
    return Table("Quality of answers", _frame(["arm", *metrics, *beside], rows), note)


def _compared(arm: ArmSummary, result: Result, against: Against) -> tuple[str, ...]:
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


def _parts(
    summary: Summary, parts: Sequence[Sequence[Part]], caption: str, column: str
) -> Iterator[Table]:
    """The main metric on some of the questions; nothing where there are no parts."""
    rows = []
    for label in dict.fromkeys(part.label for found in parts for part in found):
        for arm, found in zip(summary.arms, parts, strict=True):
            for one in (part.results[0] for part in found if part.label == label):
                kept = "–" if one.against is None else with_interval(one.against.retention)
                value = with_interval(one.estimate)
                rows.append((name(label), name(arm.name), value, kept, f"{one.n:,}"))
    if rows:
        metric = summary.metrics[0]
        head = (column, "arm", f"{metric_name(metric)}, %", "kept of the base, %", "n")
        note = "Not tested: the parts are small, and there are many of them."
        title, folded = f"{heading(metric)} {caption}", len(rows) > _LONG
        yield Table(title, _frame(head, rows), note, folded, (0, 1))


def _speed(summary: Summary) -> Iterator[Table]:
    rows = [
        (
            name(arm.name),
            f"{one.above:,} to {one.up_to:,}",
            number(one.tokens, 0),
            number(one.cold_s, 3),
            number(one.warm_s, 3),
            f"{number(one.cold_s / one.warm_s)}×" if one.warm_s > 0 else "–",
            f"{one.n:,}",
        )
        for arm in summary.arms
        for one in arm.speed
    ]
    if rows:
        head = (
            "arm",
            "tokens of context",
            "median",
            "cold, s",
            "warm, s",
            "cold / warm",
            "contexts",
        )
        yield Table("Time to the first token", _frame(head, rows), "Medians.", True, (0, 1))


def _work(summary: Summary) -> Table:
    head = {
        "windows encoded": "windows_encoded",
        "windows reused": "windows_reused",
        "tokens read": "prompt_tokens",
        "of them cached": "cached_tokens",
        "tokens written": "completion_tokens",
        "passages left out": "left_out_passages",
        "answers cut off": "unfinished",
        "errors": "errors",
    }
    seconds = {"encoding, s": "encode_s", "first token, s": "ttft_s", "answer, s": "total_s"}
    rows = [
        [
            name(arm.name),
            *(f"{getattr(arm.counters, field):,}" for field in head.values()),
            *(number(getattr(arm.times, field, None), 3) for field in seconds.values()),
        ]
        for arm in summary.arms
    ]
    note = (
        "Sums over the run; seconds are medians a question as they came in the run. An arm finds "
        "in memory what an earlier arm has encoded, so these seconds depend on the order of the "
        "arms; cold and warm times that can be compared are those of --speed."
    )
    return Table("Work", _frame(["arm", *head, *seconds], rows), note, folded=True)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is to be said of one arm.

    Attributes:
        text: a sentence.
        tone: "better", "worse", "same" or "base"; decides the mark beside it.
        deepest: whether it is of the most passages that its method read.
    """

    text: str
    tone: str
    deepest: bool


def deepest(summary: Summary) -> list[ArmSummary]:
    """Each method's arm with the most passages, in the order of the run."""
    best: dict[str, ArmSummary] = {}
    for arm in summary.arms:
        known = best.get(arm.label)
        if known is None or (arm.top_k or math.inf) > (known.top_k or math.inf):
            best[arm.label] = arm
    return list(best.values())


def verdicts(summary: Summary) -> list[Verdict]:
    """One sentence an arm, by the main metric."""
    deep, used, found = deepest(summary), {arm.base for arm in summary.arms}, []
    if not summary.compared:
        return []
    for arm in summary.arms:
        for result in arm.results[:1]:
            reached = f"{metric_name(result.metric)} {with_interval(result.estimate)}"
            if result.against is None:
                role = (
                    "what others are compared with" if arm.name in used else "compared with nothing"
                )
                text, tone = f"{name(arm.name)} is {role}: {reached}.", "base"
            else:
                text, tone = _verdict(name(arm.name), result, result.against)
            found.append(Verdict(text, tone, arm in deep))
    return found


def _verdict(arm: str, result: Result, against: Against) -> tuple[str, str]:
    metric, kept, base = metric_name(result.metric), against.retention, name(against.base)
    if math.isfinite(kept.value):
        inside = f" ({interval(kept)})" if kept.bounded else ""
        first = f"{arm} keeps {number(kept.value)}%{inside} of {base}'s {metric}"
    else:
        reached = with_interval(result.estimate)
        first = f"{arm} reaches a {metric} of {reached}, and {base} has none that could be kept"
    p, held = against.p, against.p_holm
    if p is None or held is None or not math.isfinite(p):
        return f"{first}; the difference was not tested.", "same"
    written = _equals("p", p) + (f" ({_equals('corrected', held)})" if held - p > 5e-4 else "")
    if held < LEVEL:
        gained = against.difference.value > 0
        points = f"{number(abs(against.difference.value))} points"
        told = f"a {'gain' if gained else 'loss'} of {points} is shown"
        return f"{first}; {told}, {written}.", "better" if gained else "worse"
    once = " once all arms are tested together" if p < LEVEL else ""
    return f"{first}; no difference shown{once}, {written}.", "same"


def _equals(label: str, p: float) -> str:
    text = chance(p)
    # No line ends between a name and its number.
    return f"{label} {text}" if text.startswith("<") else f"{label}\u00a0=\u00a0{text}"


def troubles(summary: Summary) -> list[str]:
    """What went otherwise than wished, one sentence each; empty where nothing did."""
    found = []
    if lacking := [f"{name(arm)} {n:,}" for arm, n in summary.missing.items() if n]:
        found.append(
            f"Not finished: answers are missing ({listed(lacking)}). All figures are of the "
            f"{summary.compared:,} of {summary.examples:,} questions that every arm was asked. "
            "Give the run's command again and it goes on."
        )
    for arm in summary.arms:
        counted, label = arm.counters, name(arm.name)
        if counted.errors:
            found.append(
                f"{label} has no answer to {some(counted.errors, 'question')} because of an error; "
                "such an answer counts as empty. Give the run's command again and they are asked "
                "again."
            )
        if counted.unfinished:
            found.append(
                f"{some(counted.unfinished, 'answer')} of {label} ended at the limit of their "
                "length, not by themselves; a larger --max-new-tokens lets them end."
            )
        if counted.left_out_passages:
            found.append(
                f"{label} left out {some(counted.left_out_passages, 'passage')} in "
                f"{some(counted.left_out_questions, 'question')}: they did not fit the model's "
                "positions."
            )
    return found


def terminal(summary: Summary) -> str:
    """A summary on one screen, as Markdown that is also plain text."""
    told = [escaped(one) for one in troubles(summary)]
    task = escaped(summary.task)
    if not summary.compared:
        return "\n\n".join([*told, f"{task}: there is no question yet that every arm was asked."])
    measured = any(arm.speed for arm in summary.arms)
    quality, cost = [], []
    for arm in summary.arms:
        main, *others = arm.results
        against = main.against
        kept = ["–", "–"]
        if against is not None:
            kept = [with_interval(against.retention), chance(against.p_holm)]
        values = [number(one.estimate.value) for one in others]
        quality.append([arm.name, with_interval(main.estimate), *kept, *values])
        times = (arm.cold_s, arm.warm_s) if measured else (getattr(arm.times, "ttft_s", math.nan),)
        seconds = [f"{one:.3g} s" if math.isfinite(one) else "–" for one in times]
        windows = arm.counters.windows_encoded, arm.counters.windows_reused
        cost.append([arm.name, *seconds, *(f"{one:,}" for one in windows)])
    first, *rest = summary.metrics
    head = ["arm", f"{first} (95%)", "retention (95%)", "p", *rest]
    speed = ["TTFT cold", "TTFT warm"] if measured else ["TTFT in the run"]
    made = [
        _frame(head, quality),
        _frame(["arm", *speed, "windows encoded", "windows reused"], cost),
    ]
    if summary.retrieval:
        rows = [
            (
                "all" if one.top_k is None else str(one.top_k),
                *(with_interval(one.recall), with_interval(one.hit), f"{one.n:,}"),
            )
            for one in summary.retrieval
        ]
        made.append(_frame(["passages", "recall (95%)", "hit (95%)", "questions"], rows))
    questions = (
        f"{task}: {some(summary.compared, 'question')} in {some(summary.groups, 'group')}, such as "
        "conversations. Quality in percent; 95% intervals are of a bootstrap that draws whole "
        "groups, p of a paired permutation test on the main metric that exchanges whole groups, "
        "corrected for all arms after Holm."
    )
    bases = dict.fromkeys(escaped(arm.base) for arm in summary.arms if arm.base is not None)
    against_whom = [f"Retention and p are against {', '.join(bases)}."] if bases else []
    blocks = [Table("", one).markdown() for one in made]
    return "\n\n".join([*blocks, questions, *against_whom, *told])


def cells(examples: Sequence[Example], values: Sequence[float | None]) -> Table:
    """A sweep over sizes and places: a row a number of passages, a column a place of the needle.

    A single passage stands everywhere and fills the first column.
    """
    rows = [
        (one.details["size"], one.details["depth"], value)
        for one, value in zip(examples, values, strict=True)
    ]
    frame = pd.DataFrame(rows, columns=["passages", "depth", "value"])
    first = frame["depth"].min()
    frame["depth"] = frame["depth"].astype(float).fillna(0.0 if math.isnan(first) else first)
    found = frame.pivot_table(index="passages", columns="depth", values="value")
    head = ["passages", *(f"position {depth:.0%}" for depth in found.columns)]
    shown = [
        [str(size), *("" if math.isnan(one) else f"{one:.1f}" for one in row)]
        for size, row in zip(found.index, found.to_numpy(), strict=True)
    ]
    return Table("", _frame(head, shown))
