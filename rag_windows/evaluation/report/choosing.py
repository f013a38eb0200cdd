"""Which questions a report shows: always the same ones of a run."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from rag_windows.evaluation.report.reported import ReportedRun, base_of, deepest
from rag_windows.evaluation.report.shown import name
from rag_windows.evaluation.summary import ArmSummary

HOW = (
    "A third of them are the largest gains over the base and a third the largest losses, by the "
    "metric that stands beside the answers and among each method's arms with the most passages (of "
    "two equal ones the earlier question). Without a base they are the best and the worst answers. "
    "The others are drawn at random, by the SHA-256 of their keys, so that they are the same ones "
    "at every report of this run."
)


@dataclass(frozen=True, slots=True)
class Choice:
    """One question that is shown.

    Attributes:
        place: in the run's examples.
        why: in words.
    """

    place: int
    why: str


@dataclass(frozen=True, slots=True)
class _Change:
    points: float
    arm: str
    base: str | None

    @property
    def words(self) -> str:
        if self.base is None:
            return f"{name(self.arm)} has {abs(self.points):.1f}"
        kind = "gain" if self.points > 0 else "loss"
        return f"{kind}: {name(self.arm)} {self.points:+.1f} points against {name(self.base)}"


def chosen(run: ReportedRun, count: int) -> list[Choice]:
    """Choose as `HOW` says; questions that an arm has not answered come last.

    Args:
        run: with its examples.
        count: how many at most.
    """
    arms = deepest(run.summary)
    whole = [place for place in range(len(run.examples)) if _answered(run, arms, place)]
    changes = [(place, change) for place in whole for change in _changes(run, arms, place)]
    taken: dict[int, str] = {}
    for found in _extremes(changes, any(base_of(arm) for arm in arms)):
        left = count // 3
        for place, change in found:
            if left and place not in taken:
                taken[place] = change.words
                left -= 1
    known = set(whole)
    others = [place for place in range(len(run.examples)) if place not in taken]
    for place in sorted(others, key=lambda one: (one not in known, _digest(run.examples[one].key))):
        if len(taken) >= count:
            break
        taken[place] = "drawn at random"
    return [Choice(place, why) for place, why in taken.items()]


def _answered(run: ReportedRun, arms: list[ArmSummary], place: int) -> bool:
    key = run.examples[place].key
    records = [run.records.get((arm.name, key)) for arm in arms]
    return all(one is not None and one.error is None for one in records)


def _changes(run: ReportedRun, arms: list[ArmSummary], place: int) -> list[_Change]:
    """Of every arm against its base; an arm without a base has its own value."""
    key = run.examples[place].key
    values: Mapping[tuple[str, str], float] = run.values.of
    compared = any(base_of(arm) for arm in arms)
    found = []
    for arm in arms:
        base = base_of(arm)
        value = values.get((arm.name, key))
        before = values.get((base, key)) if base is not None else 0.0
        if value is not None and before is not None and (base is not None or not compared):
            found.append(_Change(value - before, arm.name, base))
    return found


def _extremes(
    changes: list[tuple[int, _Change]], compared: bool
) -> tuple[list[tuple[int, _Change]], list[tuple[int, _Change]]]:
    up = sorted(changes, key=lambda one: (-one[1].points, one[0]))
    down = sorted(changes, key=lambda one: (one[1].points, one[0]))
    if not compared:
        return up, down
    return [one for one in up if one[1].points > 0], [one for one in down if one[1].points < 0]


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()
