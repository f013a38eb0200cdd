"""What is made of a run's records: scores.json, predictions and the report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from rag_windows.cli.evaluation.source import Source

if TYPE_CHECKING:
    from rag_windows.evaluation.folder import RunFolder
    from rag_windows.evaluation.summary import Summary
    from rag_windows.evaluation.task import Task


@dataclass(frozen=True, slots=True)
class Finished:
    """Figures of a run and the files that hold them.

    Attributes:
        summary: the figures.
        folder: of the run.
        scores: path of scores.json; None if it was not written.
        predictions: path of each arm's, by its name; empty for arms without a record.
        report: paths of the report, HTML first.
        beside: what else is shown of this kind of task, in Markdown.
    """

    summary: Summary
    folder: Path
    scores: Path | None = None
    predictions: Mapping[str, Path] = field(default_factory=dict)
    report: tuple[Path, ...] = ()
    beside: tuple[str, ...] = ()


def finish(task: Task, source: Source, folder: RunFolder) -> Finished:
    """Score a run and write everything that follows from its records."""
    from rag_windows.evaluation.data.writing import write_whole
    from rag_windows.evaluation.folder_files import SCORES
    from rag_windows.evaluation.report import reported, write_report
    from rag_windows.evaluation.summary_json import dump
    from rag_windows.evaluation.summary_making import summarise

    summary = summarise(task, folder)
    scores = folder.path / SCORES
    write_whole(scores, dump(summary))
    predictions = {
        arm: path
        for arm in folder.manifest.arms
        if (path := _predict(task, source, folder, arm)) is not None
    }
    run = reported(task, folder, summary, command=source.command)
    report = write_report([run], folder.path)
    beside = tuple(told_beside(task, folder))
    return Finished(summary, folder.path, scores, predictions, report, beside)


def told_beside(task: Task, folder: RunFolder) -> Iterator[str]:
    """What a task tells beside its metrics: baselines, or figures of each cell of a sweep."""
    from rag_windows.evaluation.icl import IclTask
    from rag_windows.evaluation.long import LongTask, cell_table

    if isinstance(task, IclTask):
        told = ", ".join(f"{name} {value:.1f}" for name, value in task.baselines.items())
        yield f"Accuracy without reading, in percent: {told}."
    if isinstance(task, LongTask):
        for arm in folder.manifest.arms:
            records = folder.records(arm)
            examples = [one for one in task.examples if one.key in records]
            if examples:
                table = cell_table(task.cells(examples, [records[one.key] for one in examples]))
                yield f"Found by {arm}, in percent:\n\n{table}"


def _predict(task: Task, source: Source, folder: RunFolder, arm: str) -> Path | None:
    records = folder.records(arm)
    if not any(one.key in records for one in task.examples):
        return None
    path = folder.predictions(arm, source.suffix)
    path.parent.mkdir(exist_ok=True)
    source.write_predictions(path, task.examples, records)
    return path
