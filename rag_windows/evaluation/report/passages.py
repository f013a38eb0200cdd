"""The passages of one question, each with the attention that every arm gave it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from rag_windows.evaluation.record import ReadPassage, Record
from rag_windows.evaluation.report.shown import LEAD, TEXT, Segment, name, segments, share, some

MOST = 40
"""Passages of one question that are shown, and beside them those that a right answer rests on."""

OPEN = 5
"""Passages before the fold."""


@dataclass(frozen=True, slots=True)
class Bar:
    """What one arm gave a passage.

    Attributes:
        arm: name.
        width: percent of the widest bar of the question.
        words: the share, or why there is none.
    """

    arm: str
    width: float
    words: str


@dataclass(frozen=True, slots=True)
class PassageView:
    """One passage as it is shown.

    Attributes:
        rank: from 1.
        title: or id, or neither.
        id: empty for none.
        evidence: whether a right answer rests on it.
        bars: one an arm whose attention was measured.
        tint: 0 to 1, by the mean of the bars.
        lead: beginning of the text.
        rest: what stands behind the fold.
        rest_size: its length in characters.
        windows: how many it had.
        note: what is not shown, how many windows it had, who read it.
    """

    rank: int
    title: str
    id: str
    evidence: bool
    bars: tuple[Bar, ...]
    tint: float
    lead: tuple[Segment, ...]
    rest: tuple[Segment, ...]
    rest_size: int
    windows: int
    note: str


@dataclass(frozen=True, slots=True)
class PassageList:
    """All passages of one question.

    Attributes:
        first: before the fold.
        more: behind it.
        more_words: what stands behind it.
        notes: sentences about the list.
    """

    first: tuple[PassageView, ...]
    more: tuple[PassageView, ...]
    more_words: str
    notes: tuple[str, ...]


def passage_list(
    records: Sequence[Record], evidence: frozenset[str], texts: Mapping[str, str]
) -> PassageList:
    """All that the arms read for one question, in the order of the ranking.

    Args:
        records: of one question, an arm each.
        evidence: ids of the passages that right answers rest on.
        texts: by the names that the records give.
    """
    order: dict[tuple[str, str | None], list[tuple[Record, ReadPassage]]] = {}
    for record in sorted(records, key=lambda one: -len(one.passages)):
        for read in record.passages:
            order.setdefault((read.text, read.id), []).append((record, read))
    measured = [one for one in records if any(read.mass is not None for read in one.passages)]
    masses = [read.mass for reads in order.values() for _, read in reads if read.mass is not None]
    widest = max(masses, default=0.0) or 1.0
    views = [
        _view(rank, reads, evidence, texts, measured, widest, records)
        for rank, reads in enumerate(order.values(), start=1)
        if rank <= MOST or reads[0][1].id in evidence
    ]
    notes = [_unmeasured(records, measured), _missed(evidence, order, records)]
    if len(views) < len(order):
        notes.append(
            f"{len(views):,} of {len(order):,} passages are shown: the first {MOST}, and those "
            "that a right answer rests on."
        )
    first, more = tuple(views[:OPEN]), tuple(views[OPEN:])
    marked = sum(one.evidence for one in more)
    words = f"{some(len(more), 'more passage')}" + (
        f", {marked} of them evidence" if marked else ""
    )
    return PassageList(first, more, words, tuple(filter(None, notes)))


def _view(
    rank: int,
    reads: Sequence[tuple[Record, ReadPassage]],
    evidence: frozenset[str],
    texts: Mapping[str, str],
    measured: Sequence[Record],
    widest: float,
    records: Sequence[Record],
) -> PassageView:
    passage = reads[0][1]
    text = texts.get(passage.text)
    spans = next((read.spans for _, read in reads if read.spans), ())
    known = {record.arm: read.mass for record, read in reads}
    bars = tuple(
        Bar(
            name(one.arm),
            100 * (known.get(one.arm) or 0.0) / widest,
            share(known[one.arm]) if one.arm in known else "not read",
        )
        for one in measured
    )
    found = [mass for mass in known.values() if mass is not None]
    notes = []
    if text is None:
        notes.append("the text is not in the run folder")
    elif len(text) > TEXT:
        notes.append(f"shown: the first {TEXT:,} of {len(text):,} characters")
    if len(spans) > 1:
        notes.append(f"read as {len(spans):,} windows")
    if len(reads) < len(records):
        notes.append("read by " + ", ".join(name(record.arm) for record, _ in reads))
    whole = text or ""
    lead = len(whole) if len(whole) <= LEAD * 1.4 else _word_end(whole, LEAD)
    view = PassageView(
        rank=rank,
        title=name(passage.title or passage.id or "without a title"),
        id=name(passage.id or "") if passage.title else "",
        evidence=passage.id is not None and passage.id in evidence,
        bars=bars,
        tint=(sum(found) / len(found) / widest) if found else 0.0,
        lead=segments(whole, spans, 0, lead),
        rest=(),
        rest_size=0,
        windows=len(spans),
        note="; ".join(notes),
    )
    end = min(len(whole), TEXT)
    if end <= lead:
        return view
    return replace(view, rest=segments(whole, spans, lead, end), rest_size=end - lead)


def _word_end(text: str, near: int) -> int:
    space = text.rfind(" ", near // 2, near)
    return near if space < 0 else space


def _unmeasured(records: Sequence[Record], measured: Sequence[Record]) -> str:
    names = [name(one.arm) for one in records if one not in measured and one.passages]
    if not names:
        return ""
    return f"Attention was not measured for {', '.join(names)}, so there are no bars of it."


def _missed(
    evidence: frozenset[str],
    order: dict[tuple[str, str | None], list[tuple[Record, ReadPassage]]],
    records: Sequence[Record],
) -> str:
    missed = sorted(evidence - {one for _, one in order if one is not None})
    if not missed or not any(one.passages for one in records):
        return ""
    names = [name(one, 60) for one in missed[:5]]
    more = f" and {len(missed) - 5:,} more" if len(missed) > 5 else ""
    return f"Not among the passages, though a right answer rests on it: {', '.join(names)}{more}."
