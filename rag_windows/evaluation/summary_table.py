"""A summary on one screen: what a terminal shows at the end of a run, as Markdown."""

from __future__ import annotations

import math
from collections.abc import Iterator

from rag_windows.evaluation.markdown import escaped, markdown_table
from rag_windows.evaluation.statistics.estimate import Estimate
from rag_windows.evaluation.summary import Summary

NOTHING = "–"


def summary_table(summary: Summary) -> str:
    """Quality of the arms, what they cost, the retrieval of each depth, and what to know of them.

    Returns:
        Markdown that is also plain text: names of others are escaped, columns aligned.
    """
    if not summary.compared:
        return "\n\n".join(_sentences(summary)) + "\n"
    blocks = [_quality(summary), _cost(summary), _retrieval(summary), *_sentences(summary)]
    return "\n\n".join(block.rstrip("\n") for block in blocks if block) + "\n"


def _quality(summary: Summary) -> str:
    main, *others = map(escaped, summary.metrics)
    rows = []
    for arm in summary.arms:
        first, *rest = arm.results
        against = first.against
        kept = NOTHING if against is None else _with_interval(against.retention)
        chance = NOTHING if against is None else _chance(against.p_holm)
        rows.append(
            [
                escaped(arm.name),
                _with_interval(first.estimate),
                kept,
                chance,
                *(_number(one.estimate.value) for one in rest),
            ]
        )
    return markdown_table(["arm", f"{main} (95%)", "retention (95%)", "p", *others], rows)


def _cost(summary: Summary) -> str:
    measured = any(arm.speed for arm in summary.arms)
    head = ["TTFT cold", "TTFT warm"] if measured else ["TTFT in the run"]
    rows = []
    for arm in summary.arms:
        seconds = [_seconds(arm.cold_s), _seconds(arm.warm_s)]
        if not measured:
            seconds = [NOTHING if arm.times is None else _seconds(arm.times.ttft_s)]
        encoded, reused = arm.counters.windows_encoded, arm.counters.windows_reused
        rows.append([escaped(arm.name), *seconds, f"{encoded:,}", f"{reused:,}"])
    return markdown_table(["arm", *head, "windows encoded", "windows reused"], rows)


def _retrieval(summary: Summary) -> str:
    if not summary.retrieval:
        return ""
    rows = [
        [
            "all" if one.top_k is None else str(one.top_k),
            _with_interval(one.recall),
            _with_interval(one.hit),
            f"{one.n:,}",
        ]
        for one in summary.retrieval
    ]
    head = ["passages", "recall (95%)", "hit (95%)", "questions"]
    return markdown_table(head, rows)


def _sentences(summary: Summary) -> Iterator[str]:
    """What the tables can't say; a paragraph each."""
    task = escaped(summary.task)
    if any(summary.missing.values()):
        missing = ", ".join(
            f"{escaped(name)} {count:,}" for name, count in summary.missing.items() if count
        )
        yield (
            f"Not finished: answers are missing ({missing}). All figures are of the "
            f"{summary.compared:,} of {summary.examples:,} questions that every arm was asked."
        )
    if not summary.compared:
        yield f"{task}: there is no question yet that every arm was asked."
        return
    yield (
        f"{task}: {_some(summary.compared, 'question')} in {_some(summary.groups, 'group')}, such "
        "as conversations. Quality in percent; 95% intervals are of a bootstrap that draws whole "
        "groups, p of a paired permutation test on the main metric that exchanges whole groups, "
        "corrected for all arms after Holm."
    )
    if bases := dict.fromkeys(
        one.against.base for arm in summary.arms for one in arm.results if one.against is not None
    ):
        yield f"Retention and p are against {', '.join(map(escaped, bases))}."
    yield from _troubles(summary)


def _troubles(summary: Summary) -> Iterator[str]:
    found = {escaped(arm.name): arm.counters for arm in summary.arms}
    errors = [f"{name} {one.errors:,}" for name, one in found.items() if one.errors]
    left_out = [
        f"{name} {_some(one.left_out_passages, 'passage')} of "
        f"{_some(one.left_out_questions, 'question')}"
        for name, one in found.items()
        if one.left_out_questions
    ]
    unfinished = [f"{name} {one.unfinished:,}" for name, one in found.items() if one.unfinished]
    if errors:
        yield f"Questions that ended in an error, and count as wrong: {', '.join(errors)}."
    if left_out:
        yield f"Left out, since they did not fit the model's positions: {', '.join(left_out)}."
    if unfinished:
        yield f"Answers that ended at the greatest length: {', '.join(unfinished)}."


def _some(count: int, what: str) -> str:
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"


def _with_interval(estimate: Estimate) -> str:
    if not estimate.bounded:
        return _number(estimate.value)
    return f"{_number(estimate.value)} ({_number(estimate.low)} to {_number(estimate.high)})"


def _number(value: float) -> str:
    return f"{value:.1f}" if math.isfinite(value) else NOTHING


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if math.isfinite(value) else NOTHING


def _chance(p: float | None) -> str:
    if p is None or math.isnan(p):
        return NOTHING
    return "< 0.001" if p < 0.001 else f"{p:.3f}"
