"""What a report is written from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rag_windows.evaluation.example import Example
from rag_windows.evaluation.record import Record
from rag_windows.evaluation.summary import ArmSummary, Summary


@dataclass(frozen=True, slots=True)
class Values:
    """A metric of single answers.

    Attributes:
        metric: such as "response_f1"; empty where no metric has values of single answers.
        of: percent by arm and key; an answer that the metric does not count is not in it.
    """

    metric: str
    of: Mapping[tuple[str, str], float]


@dataclass(frozen=True, slots=True)
class ReportedRun:
    """One run, with all that its part of the report shows.

    Attributes:
        settings: the manifest's.
        summary: the results.
        examples: of the data; empty where the data file is not at hand.
        records: by arm and key.
        texts: the passages' by the names that the records give them.
        values: of single answers.
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
    values: Values
    made_with: Sequence[Mapping[str, Any]] = ()
    date: str = ""
    command: str = ""
    title: str = ""


def base_of(arm: ArmSummary) -> str | None:
    """The arm that this one is compared with; None for the base itself, or without any."""
    return next((one.against.base for one in arm.results if one.against is not None), None)


def base_label(summary: Summary) -> str | None:
    """The method that the others are compared with; None where nothing is compared."""
    named = {arm.name: arm.label for arm in summary.arms}
    bases = (base_of(arm) for arm in summary.arms)
    return next((named[base] for base in bases if base in named), None)


def deepest(summary: Summary) -> list[ArmSummary]:
    """Each method's arm with the most passages, in the order of the run."""
    best: dict[str, ArmSummary] = {}
    for arm in summary.arms:
        known = best.get(arm.label)
        if known is None or _depth(arm) > _depth(known):
            best[arm.label] = arm
    return list(best.values())


def _depth(arm: ArmSummary) -> float:
    return float("inf") if arm.top_k is None else arm.top_k
