"""Questions with their answers and passages: always the same ones of a run."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from rag_windows.evaluation.record import ReadPassage, Record
from rag_windows.evaluation.report.tables import deepest
from rag_windows.evaluation.report.text import TEXT, harmless, listed, name, number, share, some
from rag_windows.evaluation.summary import ArmSummary, Summary
from rag_windows.evaluation.task import Example

HOW = (
    "A third of them are the largest gains over the base and a third the largest losses, by the "
    "metric that stands beside the answers and among each method's arms with the most passages (of "
    "two equal ones the earlier question). Without a base they are the best and the worst answers. "
    "The others are drawn at random, by the SHA-256 of their keys, so that they are the same ones "
    "at every report of this run."
)

LEAD = 320
"""Characters of a passage that stand before the fold."""

MOST = 40
"""Passages of one question that are shown, and beside them those that a right answer rests on."""

OPEN = 5
"""Passages before the fold."""


@dataclass(frozen=True, slots=True)
class ReportedRun:
    """One run, with all that its part of the report shows.

    Attributes:
        settings: the manifest's.
        summary: the results.
        examples: of the data.
        records: by arm and key.
        texts: the passages' by the names that the records give them.
        metric: the first that judges single answers; empty where none does.
        values: of that metric, percent by arm and key.
        made_with: machine and versions, one for each change of them in the run's course.
        date: of the last answer; empty where it is not known.
        command: that made the run; empty where it is not known.
        title: of its part of the report.
    """

    settings: Mapping[str, Any]
    summary: Summary
    examples: Sequence[Example]
    records: Mapping[tuple[str, str], Record]
    texts: Mapping[str, str]
    metric: str
    values: Mapping[tuple[str, str], float]
    made_with: Sequence[Mapping[str, Any]] = ()
    date: str = ""
    command: str = ""
    title: str = ""


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of a passage inside one window, by its number from 1, or in none."""

    text: str
    window: int | None
    begins: bool


@dataclass(frozen=True, slots=True)
class PassageView:
    """One passage with the attention that every arm gave it.

    Attributes:
        rank: from 1.
        passage: its names.
        evidence: whether a right answer rests on it.
        bars: one an arm whose attention was measured: its name, percent of the widest bar of the
            question, and the share in words.
        tint: 0 to 1, by the mean of the bars.
        lead: beginning of the text.
        rest: what stands behind the fold.
        windows: how many it had.
        note: what is not shown, how many windows it had, who read it.
    """

    rank: int
    passage: ReadPassage
    evidence: bool
    bars: tuple[tuple[str, float, str], ...]
    tint: float
    lead: tuple[Segment, ...]
    rest: tuple[Segment, ...]
    windows: int
    note: str


@dataclass(frozen=True, slots=True)
class Answer:
    """One arm's answer, with its score in words and what there is to be said of it."""

    arm: str
    score: str
    text: str
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Question:
    """One question that is shown.

    Attributes:
        example: itself.
        why: it was chosen.
        answers: one an arm of the most passages.
        more_answers: likewise of fewer.
        passages: all that was read.
        notes: sentences about the passages.
    """

    example: Example
    why: str
    answers: tuple[Answer, ...]
    more_answers: tuple[Answer, ...]
    passages: tuple[PassageView, ...]
    notes: tuple[str, ...]


def questions(run: ReportedRun, count: int) -> list[Question]:
    """At most so many questions, chosen as `HOW` says."""
    deep, made = deepest(run.summary), []
    others = [arm for arm in run.summary.arms if arm not in deep]
    for place, why in chosen(run, count):
        example = run.examples[place]
        found = [run.records.get((arm.name, example.key)) for arm in deep]
        records = [one for one in found if one is not None]
        passages, notes = passage_list(records, example.evidence, run.texts)
        answers, more = (
            tuple(_answer(run, arm.name, example.key) for arm in some_arms)
            for some_arms in (deep, others)
        )
        made.append(Question(example, why, answers, more, passages, notes))
    return made


def chosen(run: ReportedRun, count: int) -> list[tuple[int, str]]:
    """Places in the run's examples, and why; questions that an arm has not answered come last."""
    arms = deepest(run.summary)
    whole = [place for place in range(len(run.examples)) if _answered(run, arms, place)]
    compared = any(arm.base for arm in arms)
    changes = []
    for place in whole:
        key = run.examples[place].key
        for arm in arms:
            value = run.values.get((arm.name, key))
            before = run.values.get((arm.base, key)) if arm.base is not None else 0.0
            if value is not None and before is not None and (arm.base or not compared):
                changes.append((value - before, place, arm))
    up = sorted(changes, key=lambda one: (-one[0], one[1]))
    down = sorted(changes, key=lambda one: (one[0], one[1]))
    if compared:
        up, down = [one for one in up if one[0] > 0], [one for one in down if one[0] < 0]
    taken: dict[int, str] = {}
    for found in (up, down):
        left = count // 3
        for points, place, arm in found:
            if left and place not in taken:
                taken[place], left = _why(points, arm), left - 1
    keys = [
        hashlib.sha256(one.key.encode("utf-8", "surrogatepass")).hexdigest() for one in run.examples
    ]
    for place in sorted(range(len(keys)), key=lambda one: (one not in whole, keys[one])):
        if len(taken) < count:
            taken.setdefault(place, "drawn at random")
    return list(taken.items())


def _why(points: float, arm: ArmSummary) -> str:
    if arm.base is None:
        return f"{name(arm.name)} has {abs(points):.1f}"
    kind = "gain" if points > 0 else "loss"
    return f"{kind}: {name(arm.name)} {points:+.1f} points against {name(arm.base)}"


def _answered(run: ReportedRun, arms: Sequence[ArmSummary], place: int) -> bool:
    records = [run.records.get((arm.name, run.examples[place].key)) for arm in arms]
    return all(one is not None and one.error is None for one in records)


def _answer(run: ReportedRun, arm: str, key: str) -> Answer:
    record = run.records.get((arm, key))
    if record is None:
        return Answer(arm, "–", "", ("No record: not asked yet.",))
    return Answer(arm, number(run.values.get((arm, key))), record.answer, tuple(_notes(record)))


def _notes(record: Record) -> Iterator[str]:
    """An error, a cut, where the rest of the attention went."""
    if record.error is not None:
        yield f"Error: {name(record.error, 400)}"
    elif not record.answer.strip():
        yield "An empty answer."
    if record.finish_reason == "length":
        yield "Ended at the limit of its length."
    if record.left_out:
        yield f"{some(record.left_out, 'passage')} did not fit and were left out."
    if record.scores:
        ranked = sorted(record.scores.items(), key=lambda one: -one[1])
        told = [f"{name(choice, 40)} {number(value, 2)}" for choice, value in ranked]
        yield f"Log-probabilities: {listed(told, 6)}"
    if record.prefix_mass is not None and record.query_mass is not None:
        passages = sum(one.mass or 0.0 for one in record.passages)
        yield (
            f"Attention: passages {share(passages)}, instruction {share(record.prefix_mass)}, "
            f"question and answer {share(record.query_mass)}."
        )
    yield from (f"Note: {name(one, 300)}" for one in record.notes[:5])
    if len(record.notes) > 5:
        yield f"{some(len(record.notes) - 5, 'more note')} in records.jsonl."


def passage_list(
    records: Sequence[Record], evidence: frozenset[str], texts: Mapping[str, str]
) -> tuple[tuple[PassageView, ...], tuple[str, ...]]:
    """All that the arms read for one question, in the order of the ranking, and notes on it.

    Args:
        records: of one question, an arm each.
        evidence: ids of the passages that right answers rest on.
        texts: by the names that the records give.
    """
    order: dict[tuple[str, str | None], dict[str, ReadPassage]] = {}
    for record in sorted(records, key=lambda one: -len(one.passages)):
        for read in record.passages:
            order.setdefault((read.text, read.id), {})[record.arm] = read
    reads = [one for found in order.values() for one in found.values()]
    measured = [r.arm for r in records if any(one.mass is not None for one in r.passages)]
    widest = max((one.mass for one in reads if one.mass is not None), default=0.0) or 1.0
    views = tuple(
        _view(rank, found, name_ in evidence, texts.get(text), measured, widest, len(records))
        for rank, ((text, name_), found) in enumerate(order.items(), start=1)
        if rank <= MOST or name_ in evidence
    )
    notes = []
    if unmeasured := [name(r.arm) for r in records if r.arm not in measured and r.passages]:
        told = ", ".join(unmeasured)
        notes.append(f"Attention was not measured for {told}, so there are no bars of it.")
    missed = sorted(evidence - {name_ for _, name_ in order if name_ is not None})
    if missed and order:
        told = listed([name(one, 60) for one in missed], 5)
        notes.append(f"Not among the passages, though a right answer rests on it: {told}.")
    if len(views) < len(order):
        notes.append(
            f"{len(views):,} of {len(order):,} passages are shown: the first {MOST}, and those "
            "that a right answer rests on."
        )
    return views, tuple(notes)


def _view(
    rank: int,
    reads: Mapping[str, ReadPassage],
    evidence: bool,
    text: str | None,
    measured: Sequence[str],
    widest: float,
    asked: int,
) -> PassageView:
    spans = next((one.spans for one in reads.values() if one.spans), ())
    bars = tuple(
        (arm, 100 * (reads[arm].mass or 0.0) / widest, share(reads[arm].mass))
        if arm in reads
        else (arm, 0.0, "not read")
        for arm in measured
    )
    masses = [one.mass for one in reads.values() if one.mass is not None]
    notes = ["the text is not in the run folder"] if text is None else []
    whole = text or ""
    if len(whole) > TEXT:
        notes.append(f"shown: the first {TEXT:,} of {len(whole):,} characters")
    if len(spans) > 1:
        notes.append(f"read as {len(spans):,} windows")
    if len(reads) < asked:
        notes.append("read by " + ", ".join(map(name, reads)))
    lead, end = len(whole), min(len(whole), TEXT)
    if lead > LEAD * 1.4:
        lead = max(whole.rfind(" ", LEAD // 2, LEAD), 0) or LEAD
    return PassageView(
        rank=rank,
        passage=next(iter(reads.values())),
        evidence=evidence,
        bars=bars,
        tint=sum(masses) / len(masses) / widest if masses else 0.0,
        lead=segments(whole, spans, 0, lead),
        rest=segments(whole, spans, lead, end) if end > lead else (),
        windows=len(spans),
        note="; ".join(notes),
    )


def segments(
    text: str, spans: Sequence[tuple[int, int]], start: int, end: int
) -> tuple[Segment, ...]:
    """Cut a stretch of a text where windows begin and end.

    Args:
        text: whole.
        spans: what each window holds, in characters, end exclusive; those that reach beyond the
            text are shortened, and where two overlap the first one counts.
        start: of the stretch.
        end: likewise, exclusive.
    """
    end = min(end, len(text))
    # A window that begins beyond the stretch has no say in it, and there may be many.
    near = [(n, a, b) for n, (a, b) in enumerate(spans, start=1) if a < end and b > start]
    edges = {start, end, *(edge for _, a, b in near for edge in (a, b) if start < edge < end)}
    found: list[Segment] = []
    seen: set[int | None] = {None}
    for left, right in pairwise(sorted(edges)):
        inside = ((n, a >= start) for n, a, b in near if a <= left and b >= right)
        window, begun = next(inside, (None, False))
        found.append(Segment(harmless(text[left:right]), window, begun and window not in seen))
        seen.add(window)
    return tuple(found)
