"""What a run found, in sentences."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from rag_windows.evaluation.report.reported import deepest
from rag_windows.evaluation.report.shown import chance, listed, name, number, some
from rag_windows.evaluation.statistics.estimate import Estimate
from rag_windows.evaluation.summary import Against, ArmSummary, Result, Summary

LEVEL = 0.05
"""Of p after Holm's correction: what is called shown."""

_WORDS = {"f1": "F1", "bleu": "BLEU", "chatrag": "ChatRAG", "mrr": "MRR"}
_TONES = {True: "better", False: "worse"}


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
    deepest: bool = True


def metric_name(metric: str) -> str:
    """Such as "response F1" of "response_f1"."""
    return name(" ".join(_WORDS.get(word, word) for word in metric.split("_")))


def heading(metric: str) -> str:
    """The same with a capital."""
    words = metric_name(metric)
    return words[:1].upper() + words[1:]


def interval(estimate: Estimate) -> str:
    """Such as "95.2 to 101.3"; a dash where there is none."""
    if not estimate.bounded:
        return "–"
    return f"{number(estimate.low)} to {number(estimate.high)}"


def with_interval(estimate: Estimate, *, signed: bool = False) -> str:
    """Such as "98.1 (95.2 to 101.3)"; with a plus before what is above zero if ``signed``."""
    inside = f" ({interval(estimate)})" if estimate.bounded else ""
    plus = "+" if signed and round(estimate.value, 1) > 0 else ""
    return plus + number(estimate.value) + inside


def verdicts(summary: Summary) -> list[Verdict]:
    """One sentence an arm, by the main metric."""
    if not summary.compared:
        return []
    used = {one.against.base for arm in summary.arms for one in arm.results if one.against}
    deep = {arm.name for arm in deepest(summary)}
    found = []
    for arm in summary.arms:
        for result in arm.results[:1]:
            against = result.against
            said = (
                _base(arm.name, result, used)
                if against is None
                else _compared(arm.name, result, against)
            )
            found.append(replace(said, deepest=arm.name in deep))
    return found


def _base(arm: str, result: Result, used: Collection[str]) -> Verdict:
    reached = f"{metric_name(result.metric)} {with_interval(result.estimate)}"
    role = "is what others are compared with" if arm in used else "is compared with nothing"
    return Verdict(f"{name(arm)} {role}: {reached}.", "base")


def _compared(arm: str, result: Result, against: Against) -> Verdict:
    metric, kept = metric_name(result.metric), against.retention
    if math.isfinite(kept.value):
        inside = f" ({interval(kept)})" if kept.bounded else ""
        first = (
            f"{name(arm)} keeps {number(kept.value)}%{inside} of {name(against.base)}'s {metric}"
        )
    else:
        first = (
            f"{name(arm)} reaches a {metric} of {with_interval(result.estimate)}, and "
            f"{name(against.base)} has none that could be kept"
        )
    outcome, tone = _outcome(against)
    return Verdict(f"{first}; {outcome}.", tone)


def _outcome(against: Against) -> tuple[str, str]:
    p, held = against.p, against.p_holm
    if p is None or not math.isfinite(p):
        return "the difference was not tested", "same"
    used = held if held is not None and math.isfinite(held) else p
    written = _equals("p", p)
    if held is not None and abs(held - p) > 5e-4:
        written += f" ({_equals('corrected', held)})"
    if used < LEVEL:
        points = against.difference
        better = points.value > 0
        size = f"{number(abs(points.value))} points"
        return f"a {'gain' if better else 'loss'} of {size} is shown, {written}", _TONES[better]
    if p < LEVEL:
        return f"no difference shown once all arms are tested together, {written}", "same"
    return f"no difference shown, {written}", "same"


def _equals(label: str, p: float) -> str:
    text = chance(p)
    # No line ends between a name and its number.
    return f"{label} {text}" if text.startswith("<") else f"{label} = {text}".replace(" ", "\u00a0")


def counters(summary: Summary) -> list[str]:
    """What went otherwise than wished, one sentence each; empty where nothing did."""
    lacking: dict[int, list[str]] = {}
    for arm, count in summary.missing.items():
        if count:
            lacking.setdefault(count, []).append(name(arm))
    found = []
    if lacking:
        told = "; ".join(f"{some(n, 'question')} of {listed(arms)}" for n, arms in lacking.items())
        found.append(
            f"The run is not finished: it has no record yet of {told}. Give its command again and "
            "it goes on."
        )
    left = summary.examples - summary.compared
    if left > 0:
        found.append(
            f"{some(left, 'question')} of {summary.examples:,} "
            f"{'is' if left == 1 else 'are'} not in any figure here, since not every arm has a "
            "record of it."
        )
    for one in summary.arms:
        found.extend(_of_arm(one))
    return found


def _of_arm(arm: ArmSummary) -> Sequence[str]:
    counted, label = arm.counters, name(arm.name)
    found = []
    if counted.errors:
        found.append(
            f"{label} has no answer to {some(counted.errors, 'question')} because of an error; "
            "such an answer counts as empty. Give the run's command again and they are asked "
            "again."
        )
    if counted.unfinished:
        found.append(
            f"{some(counted.unfinished, 'answer')} of {label} ended at the limit of their length, "
            "not by themselves; a larger --max-new-tokens lets them end."
        )
    if counted.left_out_passages:
        found.append(
            f"{label} left out {some(counted.left_out_passages, 'passage')} in "
            f"{some(counted.left_out_questions, 'question')}: they did not fit the model's "
            "positions."
        )
    return found
