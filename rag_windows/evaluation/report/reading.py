"""A run's folder, read for its report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

from rag_windows.evaluation.example import Example
from rag_windows.evaluation.folder import RunFolder
from rag_windows.evaluation.record import Record
from rag_windows.evaluation.report.reported import ReportedRun, Values
from rag_windows.evaluation.summary import Summary
from rag_windows.evaluation.summary_making import summarise
from rag_windows.evaluation.task import Score, Task


def reported(
    task: Task, folder: RunFolder, summary: Summary | None = None, *, command: str = ""
) -> ReportedRun:
    """What a report of a run is written from.

    Args:
        task: that the run asks.
        folder: of the run; one that is not finished will do.
        summary: of the run; made anew unless given.
        command: that made the run, to be shown.
    """
    names = folder.manifest.arms
    records = {(arm, key): record for arm in names for key, record in folder.records(arm).items()}
    keys = set(folder.manifest.keys)
    examples = [one for one in task.examples if one.key in keys]
    if (shard := folder.manifest.shard) is not None:
        examples = shard.pick(examples)
    return ReportedRun(
        settings=folder.manifest.settings,
        summary=summarise(task, folder) if summary is None else summary,
        examples=examples,
        records=records,
        texts=folder.texts,
        values=values_of(task, names, examples, records),
        made_with=folder.manifest.made_with,
        date=_date(folder),
        command=command,
        title=folder.path.name,
    )


def values_of(
    task: Task,
    arms: Sequence[str],
    examples: Sequence[Example],
    records: Mapping[tuple[str, str], Record],
) -> Values:
    """The first metric that judges single answers, for every answer that there is."""
    scores: dict[str, tuple[Sequence[Example], list[Score]]] = {}
    for arm in arms:
        asked = [one for one in examples if (arm, one.key) in records]
        if asked:
            answers = [records[arm, one.key] for one in asked]
            scores[arm] = asked, task.scores(asked, answers)
    for place, metric in enumerate(task.metrics):
        found = {
            (arm, example.key): value
            for arm, (asked, made) in scores.items()
            for example, value in zip(asked, made[place].values, strict=True)
            if value is not None
        }
        if found:
            return Values(metric, found)
    return Values("", {})


def _date(folder: RunFolder) -> str:
    path = folder.path / "records.jsonl"
    if not path.is_file():
        return ""
    return datetime.fromtimestamp(path.stat().st_mtime, UTC).strftime("%Y-%m-%d %H:%M UTC")
