"""What a run found, in tables: for the terminal, for Markdown and for HTML."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import pandas as pd
from markupsafe import Markup

from rag_windows.evaluation.report.text import (
    NOTHING,
    chance,
    escaped,
    figure,
    metric_name,
    name,
    number,
    rendered,
)
from rag_windows.evaluation.summary import ArmSummary, Summary
from rag_windows.evaluation.task import Example

WORDS = frozenset({"arm", "base", "evidence", "kind", "run", "tokens of context"})
"""Columns that hold words; the others hold figures."""

LEVEL = 0.05
"""Of p after Holm's correction: what is called shown."""

_LONG = 8
"""Rows above which a table of parts is folded."""


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """A caption, strings in rows, a note below them, and whether a page may fold it away."""

    caption: str
    frame: pd.DataFrame
    note: str = ""
    folded: bool = False

    @property
    def markdown(self) -> Markup:
        """Aligned where it is read as plain text, too; names of others are escaped."""
        sides = ["left" if head in WORDS else "right" for head in self.frame.columns]
        frame = self.frame.map(name).map(escaped).rename(columns=escaped)
        made = frame.to_markdown(index=False, disable_numparse=True, colalign=sides)
        return Markup(made)  # noqa: S704 - escaped above


def tables(summary: Summary) -> Iterator[Table]:
    """Every table, in the order of a report."""
    if summary.compared:
        yield _quality(summary)
        found = _results(summary)
        for place, metric in enumerate(summary.metrics):
            rows = found[
                (found["metric"] == metric) & (found["part"] == "") & (found["base"] != "")
            ]
            if len(rows):
                caption = f"{metric_name(metric, capital=True)}: each arm against its base"
                columns = ["arm", "value, %", "difference, points", "kept, %", "p", "p (Holm)"]
                yield Table(caption, rows[[*columns, "n", "base"]], folded=place > 0)
        main, note = summary.metrics[0], "Not tested: the parts are small, and there are many."
        for part, words in (
            ("kind", "by kind of question"),
            ("evidence", "by whether the passages held evidence"),
        ):
            rows = found[(found["metric"] == main) & (found["part"] == part)]
            if len(rows):
                caption = f"{metric_name(main, capital=True)} {words}"
                # By label, and the arms of each in their order.
                rows = pd.concat(own for _, own in rows.groupby("label", sort=False))
                rows = rows.rename(columns={"label": part})
                frame = rows[[part, "arm", "value, %", "kept, %", "n"]]
                yield Table(caption, frame, note, folded=len(rows) > _LONG)
    speed = [
        {
            "arm": arm.name,
            "tokens of context": f"{one.above:,} to {one.up_to:,}",
            "median": number(one.tokens, 0),
            "cold, s": number(one.cold_s, 3),
            "warm, s": number(one.warm_s, 3),
            "cold / warm": f"{number(one.cold_s / one.warm_s)}×" if one.warm_s > 0 else NOTHING,
            "contexts": f"{one.n:,}",
        }
        for arm in summary.arms
        for one in arm.speed
    ]
    if speed:
        yield Table("Time to the first token", pd.DataFrame(speed), "Medians.", folded=True)
    yield Table(
        "Work",
        _work(summary),
        "Sums over the run; seconds are medians a question as they came in the run. An arm finds "
        "in memory what an earlier arm has encoded, so these seconds depend on the order of the "
        "arms; only those of --speed, cold and warm, can be compared.",
        folded=True,
    )


def overview(runs: Sequence[tuple[str, Summary]]) -> Table:
    """The quality of all arms of several runs, with their titles."""
    frames = [_quality(summary).frame for _, summary in runs if summary.compared]
    titles = [title for title, summary in runs if summary.compared]
    frame = pd.concat(frames, keys=titles, names=["run"]).reset_index("run").fillna(NOTHING)
    note = "Side by side only: arms are tested against each other inside a run, not between runs."
    return Table("All runs", frame, note)


def _results(summary: Summary) -> pd.DataFrame:
    """Every figure in words: a row for each arm, metric and part of the questions ("" for all)."""
    rows = []
    for arm in summary.arms:
        parts = [("", "", arm.results)]
        parts += [("kind", one.label, one.results) for one in arm.kinds]
        parts += [("evidence", one.label, one.results) for one in arm.retrieval]
        for part, label, results in parts:
            for one in results:
                against = one.against
                row = {
                    "part": part,
                    "label": label,
                    "metric": one.metric,
                    "arm": arm.name,
                    "value, %": figure(one.estimate),
                    "difference, points": figure(getattr(against, "difference", None), signed=True),
                    "kept, %": figure(getattr(against, "retention", None)),
                    "p": chance(getattr(against, "p", None)),
                    "p (Holm)": chance(getattr(against, "p_holm", None)),
                    "n": f"{one.n:,}",
                    "base": against.base if against else "",
                }
                rows.append(row)
    return pd.DataFrame(rows)


def _quality(summary: Summary) -> Table:
    columns = [metric_name(one) for one in summary.metrics]
    rows = [[arm.name, *(figure(one.estimate) for one in arm.results)] for arm in summary.arms]
    frame = pd.DataFrame(rows, columns=["arm", *columns])
    note = "Percent, with 95% intervals."
    if not any(one.estimate.bounded for arm in summary.arms for one in arm.results):
        note = "Percent. There are no intervals, which need at least two conversations."
    counts = {one.n for arm in summary.arms for one in arm.results}
    if len(counts) == 1:
        note += f" n = {counts.pop():,} questions for every metric."
    if summary.retrieval:
        depths = {one.top_k: one for one in summary.retrieval}
        found = [depths.get(arm.top_k) for arm in summary.arms]
        frame["evidence found, % of it"] = [figure(getattr(one, "recall", None)) for one in found]
        frame["questions with some found, %"] = [figure(getattr(one, "hit", None)) for one in found]
        note += (
            " The last two columns are the retriever's, over the "
            f"{max(one.n for one in depths.values()):,} questions that name evidence: what no "
            "passage holds, no reader can answer from passages."
        )
    return Table("Quality of answers", frame, note)


def _work(summary: Summary) -> pd.DataFrame:
    counted = {
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
        {"arm": arm.name}
        | {head: f"{getattr(arm.counters, field):,}" for head, field in counted.items()}
        | {head: number(getattr(arm.times, field, None), 3) for head, field in seconds.items()}
        for arm in summary.arms
    ]
    return pd.DataFrame(rows)


def deepest(summary: Summary) -> list[ArmSummary]:
    """Each method's arm with the most passages, in the order of the run."""
    best: dict[str, ArmSummary] = {}
    for arm in summary.arms:
        known = best.setdefault(arm.label, arm)
        if (arm.top_k or math.inf) > (known.top_k or math.inf):
            best[arm.label] = arm
    return list(best.values())


def verdict(arm: ArmSummary, bases: Collection[str | None]) -> tuple[str, str]:
    """A sentence on one arm by the main metric, and its tone: better, worse, same or base."""
    result, label = arm.results[0], name(arm.name)
    metric, against = metric_name(result.metric), result.against
    if against is None:
        role = "what others are compared with" if arm.name in bases else "compared with nothing"
        return f"{label} is {role}: {metric} {figure(result.estimate)}.", "base"
    first = f"{label} keeps {figure(against.retention)} percent of {name(against.base)}'s {metric}"
    if not math.isfinite(against.retention.value):
        reached = figure(result.estimate)
        first = f"{label} has a {metric} of {reached}, {name(against.base)} none that could be kept"
    if against.p is None or against.p_holm is None or not math.isfinite(against.p):
        return f"{first}; the difference was not tested.", "same"
    tested = f"p {chance(against.p)}, corrected {chance(against.p_holm)}"
    if against.p_holm >= LEVEL:
        once = " once all arms are tested together" if against.p < LEVEL else ""
        return f"{first}; no difference shown{once} ({tested}).", "same"
    points = against.difference.value
    kind, tone = ("gain", "better") if points > 0 else ("loss", "worse")
    return f"{first}; a {kind} of {number(abs(points))} points is shown ({tested}).", tone


def terminal(summary: Summary) -> str:
    """A summary on one screen, as Markdown that is also plain text."""
    frames = []
    if summary.compared:
        first, *rest = summary.metrics
        found = _results(summary)
        found = found[found["part"] == ""]
        main = found[found["metric"] == first][["arm", "value, %", "kept, %", "p (Holm)"]]
        main = main.rename(columns={"value, %": f"{first} (95%)"})
        for place, metric in enumerate(rest, start=1):
            # Without their intervals, which the report has.
            main[metric] = [number(arm.results[place].estimate.value) for arm in summary.arms]
        cost = _work(summary)[["arm", "first token, s", "windows encoded", "windows reused"]]
        if any(arm.speed for arm in summary.arms):
            cost.insert(1, "cold, s", [number(arm.cold_s, 3) for arm in summary.arms])
            cost.insert(2, "warm, s", [number(arm.warm_s, 3) for arm in summary.arms])
        frames = [main, cost]
        if summary.retrieval:
            rows = [
                ("all" if one.top_k is None else one.top_k, figure(one.recall), figure(one.hit))
                for one in summary.retrieval
            ]
            columns = ["passages", "recall (95%)", "hit (95%)"]
            frames.append(pd.DataFrame(rows, columns=columns).astype(str))
    bases = {arm.base: None for arm in summary.arms if arm.base}
    shown = [Table("", one) for one in frames]
    return rendered("terminal.md", summary=summary, tables=shown, bases=list(bases)).strip()


def cells(examples: Sequence[Example], values: Sequence[float | None]) -> Table:
    """A sweep over sizes and places: a row a number of passages, a column a place of the needle."""
    frame = pd.DataFrame([one.details for one in examples]).assign(value=values)
    # A single passage stands everywhere, and is shown in the first column.
    depths = frame["depth"].astype(float)
    frame["depth"] = depths.fillna(depths.min()).fillna(0.0)
    found = frame.pivot_table(index="size", columns="depth", values="value").map(number)
    found.columns = [f"position {depth:.0%}" for depth in found.columns]
    return Table("", found.rename_axis("passages").reset_index().astype(str))
