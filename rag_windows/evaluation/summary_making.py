"""From a run's records to its summary."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from rag_windows.evaluation.example import Example
from rag_windows.evaluation.folder_files import MANIFEST
from rag_windows.evaluation.record import Record, Speed
from rag_windows.evaluation.statistics.bootstrap import Bootstrap
from rag_windows.evaluation.statistics.estimate import Estimate
from rag_windows.evaluation.statistics.groups import Groups
from rag_windows.evaluation.statistics.parts import Parts
from rag_windows.evaluation.summary import FOUND, MISSED, ArmSummary, Retrieval, Summary
from rag_windows.evaluation.summary_arms import ArmLike, base_of, known_arms
from rag_windows.evaluation.summary_costs import counters, median_s, speed_bins, times
from rag_windows.evaluation.summary_results import (
    MetricFigures,
    Section,
    kind_sections,
    parts_of,
)
from rag_windows.evaluation.summary_retrieval import Retrieved, Values, retrieved
from rag_windows.evaluation.task import Score, Task

if TYPE_CHECKING:
    from rag_windows.evaluation.folder import RunFolder


def summarise(task: Task, folder: RunFolder) -> Summary:
    """Summarise what a run has answered so far.

    Args:
        task: of the run.
        folder: of the run; one that is not finished will do.

    Raises:
        DataError: the manifest describes an arm otherwise than this version does.
    """
    arms = known_arms(folder.manifest.settings, str(folder.path / MANIFEST))
    wanted = set(folder.manifest.keys)
    examples: Sequence[Example] = [one for one in task.examples if one.key in wanted]
    if (shard := folder.manifest.shard) is not None:
        examples = shard.pick(examples)
    return summarise_records(
        task,
        arms,
        {one.name: folder.records(one.name) for one in arms},
        {one.name: tuple(folder.speeds(one.name).values()) for one in arms},
        examples,
    )


def summarise_records(
    task: Task,
    arms: Sequence[ArmLike],
    records: Mapping[str, Mapping[str, Record]],
    speeds: Mapping[str, Iterable[Speed]] | None = None,
    examples: Sequence[Example] | None = None,
) -> Summary:
    """Summarise records, wherever they come from.

    Args:
        task: gives the scores.
        arms: at least one.
        records: of each arm by its name, then by the key of the example.
        speeds: of each arm by its name; None where none were measured.
        examples: those asked; None for all of the task.
    """
    asked = task.examples if examples is None else examples
    by_arm = [records.get(arm.name, {}) for arm in arms]
    shared = [one for one in asked if all(one.key in found for found in by_arm)]
    answers = [[found[one.key] for one in shared] for found in by_arm]
    groups = Groups.of([one.group for one in shared])
    by_depth = _by_depth(arms, shared, answers)
    kinds = kind_sections(shared)
    sections = list(kinds)
    first: dict[int | None, int] = {}
    for depth, found in by_depth.items():
        first[depth] = len(sections)
        sections += _hit_sections(found)
    figures = _figures(task, arms, shared, answers, groups, sections) if shared else []
    made = []
    for place, arm in enumerate(arms):
        start = first.get(arm.top_k)
        measured = tuple((speeds or {}).get(arm.name, ()))
        split = [] if start is None else sections[start : start + 2]
        made.append(
            ArmSummary(
                name=arm.name,
                label=arm.label,
                top_k=arm.top_k,
                results=tuple(metric.whole(place) for metric in figures),
                kinds=parts_of(figures, place, kinds),
                retrieval=parts_of(figures, place, split, start or 0),
                counters=counters(answers[place]),
                times=times(answers[place]),
                speed=speed_bins(measured),
                cold_s=median_s(one.cold_s for one in measured),
                warm_s=median_s(one.warm_s for one in measured),
            )
        )
    return Summary(
        task=task.name,
        metrics=tuple(task.metrics),
        examples=len(asked),
        compared=len(shared),
        groups=groups.count,
        missing={
            arm.name: sum(one.key not in found for one in asked)
            for arm, found in zip(arms, by_arm, strict=True)
        },
        arms=tuple(made),
        retrieval=tuple(_retrieval(depth, found, groups) for depth, found in by_depth.items()),
    )


def _figures(
    task: Task,
    arms: Sequence[ArmLike],
    examples: Sequence[Example],
    answers: Sequence[Sequence[Record]],
    groups: Groups,
    sections: Sequence[Section],
) -> list[MetricFigures]:
    """One a metric, in the task's order."""
    names = [arm.name for arm in arms]
    bases = [base_of(arms, place) for place in range(len(arms))]
    scored: list[dict[str, Score]] = [
        {score.name: score for score in task.scores(examples, one)} for one in answers
    ]
    return [
        MetricFigures([one[metric] for one in scored], names, bases, groups, sections)
        for metric in task.metrics
    ]


def _by_depth(
    arms: Sequence[ArmLike], examples: Sequence[Example], answers: Sequence[Sequence[Record]]
) -> dict[int | None, Retrieved]:
    found = {}
    for depth in dict.fromkeys(arm.top_k for arm in arms):
        own = {arm.name: one for arm, one in zip(arms, answers, strict=True) if arm.top_k == depth}
        if (one := retrieved(examples, own, depth)) is not None:
            found[depth] = one
    return found


def _hit_sections(found: Retrieved) -> list[Section]:
    return [
        Section(FOUND, tuple(one is not None and one > 0 for one in found.hit)),
        Section(MISSED, tuple(one == 0 for one in found.hit)),
    ]


def _retrieval(depth: int | None, found: Retrieved, groups: Groups) -> Retrieval:
    n = sum(one is not None for one in found.hit)
    return Retrieval(depth, n, _mean(found.recall, groups), _mean(found.hit, groups))


def _mean(values: Values, groups: Groups) -> Estimate:
    parts = Parts.of_mean(values)
    sums: np.ndarray[tuple[int, ...], np.dtype[np.float64]] = groups.add_up(parts.array)[:, None]
    return Bootstrap(sums, parts.formula).value(0)
