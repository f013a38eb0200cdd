"""Where a run's questions come from, so that its folder can be reported again later."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel

from rag_windows.errors import DataError
from rag_windows.evaluation.asking import Answerer, Generating
from rag_windows.evaluation.chatrag import ChatRagTask, write_answers
from rag_windows.evaluation.files import read, write_whole
from rag_windows.evaluation.icl import IclAnswerer, IclTask
from rag_windows.evaluation.inscit import InscitTask, write_predictions
from rag_windows.evaluation.long import LongTask
from rag_windows.evaluation.record import Record
from rag_windows.evaluation.report.tables import cells
from rag_windows.evaluation.run import SOURCE, Manifest, RunFolder, RunOptions
from rag_windows.evaluation.task import Task


class Source(BaseModel):
    """What a command was told about its data.

    It is no part of the run's settings: a data file may lie elsewhere tomorrow.

    Attributes:
        kind: of task.
        data: the data file, or None where the project makes the questions itself.
        limit: only so many of the first questions, or None.
        options: of the reader of this kind, JSON values.
        command: that made the run.
    """

    kind: Literal["inscit", "chatrag", "icl", "long"]
    data: str | None = None
    limit: int | None = None
    options: dict[str, Any] = {}
    command: str = ""

    def task(self) -> Task:
        """Read the data.

        Raises:
            DataError: it can't be read, naming file, record and field.
            MissingExtraError: a package that reads it is not installed.
        """
        options = dict(self.options)
        if self.kind == "long":
            return LongTask.open(
                _path(self.data), haystack=_path(options.pop("haystack")), **options
            )
        if self.data is None:
            raise DataError("The run's data file is not known; name it with --data.")
        if self.kind == "icl":
            return IclTask.open(self.data, texts=self.limit, **options)
        task: InscitTask | ChatRagTask
        if self.kind == "inscit":
            task = InscitTask.read(self.data, **options)
        else:
            task = ChatRagTask.read(self.data, options.pop("dataset"), **options)
        if self.limit is None or self.limit >= len(task.examples):
            return task
        settings = {**task.settings, "limit": self.limit}
        return replace(task, examples=task.examples[: self.limit], settings=settings)

    def check(self, task: Task, manifest: Manifest) -> None:
        """Refuse data that are not those which a run read, whatever the file's name is now.

        Raises:
            DataError: they differ.
        """
        kept = _nameless(manifest.settings["task"])
        now = _nameless(json.loads(json.dumps({"name": task.name, **task.settings})))
        if tuple(one.key for one in task.examples) != manifest.keys or kept != now:
            raise DataError(
                f"{self.data} holds other data than the run of {manifest.task} read; name the data "
                "file of that run with --data."
            )

    def answerer(self, task: Task, options: RunOptions) -> Answerer:
        """What answers the task."""
        if isinstance(task, IclTask):
            return IclAnswerer(task, options.prefix)
        return Generating(options)

    def write_predictions(self, folder: RunFolder, task: Task, arm: str) -> Path:
        """Write one arm's answers in the dataset's own format: INSCIT's, or a line an answer.

        INSCIT's names the question of each answer; in the other one the number of the line does, so
        that a question without an answer has an empty line there.
        """
        records: Mapping[str, Record] = folder.records(arm)
        if isinstance(task, InscitTask):
            path = folder.predictions(arm)
            write_predictions(path, task.examples, records, task.evidence)
            return path
        path = folder.predictions(arm, ".txt")
        found = [records.get(one.key) for one in task.examples]
        write_answers(path, ["" if one is None else one.answer for one in found])
        return path

    def save(self, folder: Path) -> None:
        """Write it into a run's folder."""
        write_whole(folder / SOURCE, json.dumps(self.model_dump(), indent=2) + "\n")

    @classmethod
    def load(cls, folder: Path, moved: Path | None) -> Source:
        """Read what `save` wrote; the data file lies where it was ``moved`` to, if it was.

        Raises:
            DataError: there is none, or it is something else.
        """
        found = read(folder / SOURCE).json(cls)
        return found if moved is None else found.model_copy(update={"data": str(moved)})


def beside(task: Task, folder: RunFolder) -> Iterator[str]:
    """What a task tells beside its metrics: baselines, or figures of each cell of a sweep."""
    if isinstance(task, IclTask):
        told = ", ".join(f"{name} {value:.1f}" for name, value in task.baselines.items())
        yield f"Accuracy without reading, in percent: {told}."
    if isinstance(task, LongTask):
        for arm in folder.manifest.arms:
            if records := folder.records(arm.name):
                examples = [one for one in task.examples if one.key in records]
                found = task.scores(examples, [records[one.key] for one in examples])[0].values
                yield f"Found by {arm.name}, in percent:\n\n{cells(examples, found).markdown}"


def _path(text: str | None) -> Path | None:
    return None if text is None else Path(text)


def _nameless(value: Any) -> Any:
    """Settings without the names of files, of which the digests tell enough."""
    if not isinstance(value, Mapping):
        return value
    named = {"file"} if "sha256" in value else set()
    return {key: _nameless(one) for key, one in value.items() if key not in named}
