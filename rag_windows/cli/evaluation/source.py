"""Where a run's questions come from, so that its folder can be scored again later."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from rag_windows.errors import DataError, InputError

if TYPE_CHECKING:
    from rag_windows.evaluation.answering import Answerer
    from rag_windows.evaluation.arm import Arm
    from rag_windows.evaluation.example import Example
    from rag_windows.evaluation.options import RunOptions
    from rag_windows.evaluation.record import Record
    from rag_windows.evaluation.task import Task

Kind = Literal["inscit", "chatrag", "icl", "long"]

FILE = "source.json"
"""In a run's folder. It is no part of the settings: a data file may lie elsewhere tomorrow."""


@dataclass(frozen=True, slots=True)
class Source:
    """What a command was told about its data.

    Attributes:
        kind: of task.
        data: the data file, or None where the project makes the questions itself.
        limit: only so many of the first questions, or None.
        options: of the reader of this kind, JSON values.
        command: that made the run.
    """

    kind: Kind
    data: str | None = None
    limit: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    command: str = ""

    def task(self) -> Task:
        """Read the data.

        Raises:
            DataError: it can't be read, naming file, record and field.
            MissingExtraError: a package that scores or reads it is not installed.
        """
        task = _opened(self)
        # The others draw their questions, or take as many as they are told.
        return _first(task, self.limit) if self.kind in ("inscit", "chatrag") else task

    def notes(self, task: Task, arms: Sequence[Arm]) -> list[str]:
        """What the user should be told before the work.

        Raises:
            InputError: the data can't serve the arms.
        """
        if self.kind == "icl":
            from rag_windows.evaluation.icl import IclTask

            if isinstance(task, IclTask):
                task.check([arm.top_k for arm in arms])
        missing = getattr(task, "unfound", 0)
        if not missing:
            return []
        return [f"{missing} evidence passages are not in the corpus: no retriever can find them."]

    def answerer(self, task: Task, options: RunOptions) -> Answerer | None:
        """What answers a task that is not answered by writing."""
        if self.kind != "icl":
            return None
        from rag_windows.evaluation.icl import IclTask

        return task.answerer(options.prefix) if isinstance(task, IclTask) else None

    def write_predictions(
        self, path: Path, examples: Sequence[Example], records: Mapping[str, Record]
    ) -> None:
        """Write one arm's answers in the dataset's own format: INSCIT's, or a line an answer.

        INSCIT's names the question of each answer; in the other one the number of the line does, so
        that a question without an answer has an empty line there.

        Args:
            path: of the file, with `suffix`.
            examples: all of them.
            records: by the examples' keys; some may be missing.
        """
        if self.kind == "inscit":
            from rag_windows.evaluation.data.inscit_predictions import write_predictions

            evidence = int(self.options.get("evidence", 1))
            answered = [one for one in examples if one.key in records]
            write_predictions(
                path, answered, [records[one.key] for one in answered], evidence=evidence
            )
        else:
            from rag_windows.evaluation.data.chatrag_answers import write_answers

            found = [records.get(one.key) for one in examples]
            write_answers(path, ["" if one is None else one.answer for one in found])

    @property
    def suffix(self) -> str:
        """Of a file of predictions."""
        return ".json" if self.kind == "inscit" else ".txt"

    def moved(self, data: Path | None) -> Source:
        """The same with the data file where it lies now; None for where it lay."""
        return self if data is None else dataclasses.replace(self, data=str(data))

    def save(self, folder: Path) -> None:
        """Write `FILE` into a run's folder."""
        from rag_windows.evaluation.data.writing import write_whole

        write_whole(folder / FILE, json.dumps(dataclasses.asdict(self), indent=2) + "\n")

    @classmethod
    def load(cls, folder: Path) -> Source:
        """Read what `save` wrote.

        Raises:
            DataError: there is none, or it is something else.
        """
        path = folder / FILE
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
            kind, data, limit = value["kind"], value["data"], value["limit"]
            found = cls(kind, data, limit, dict(value["options"]), str(value["command"]))
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise DataError(
                f"{path} does not tell what the run read; is {str(folder)!r} the folder of a run?"
            ) from error
        if kind not in get_args(Kind) or not isinstance(data, str | None):
            raise DataError(f"{path} names a kind of data that this version does not know.")
        return found


def _opened(source: Source) -> Task:
    options = dict(source.options)
    if source.kind == "inscit":
        from rag_windows.evaluation.data.inscit import InscitTask

        corpus = options.pop("corpus", None)
        return InscitTask.read(
            _path(source), corpus=None if corpus is None else Path(corpus), **options
        )
    if source.kind == "chatrag":
        from rag_windows.evaluation.data.chatrag import ChatRagTask

        return ChatRagTask.read(_path(source), options.pop("dataset"), **options)
    if source.kind == "icl":
        return _icl(source, options)
    from rag_windows.evaluation.long import LongOptions, LongTask

    haystack = options.pop("haystack")
    sizes, depths = tuple(options.pop("sizes")), tuple(options.pop("depths"))
    return LongTask.open(
        None if source.data is None else Path(source.data),
        haystack=None if haystack is None else Path(haystack),
        options=LongOptions(sizes=sizes, depths=depths, **options),
    )


def _icl(source: Source, options: dict[str, Any]) -> Task:
    from rag_windows.evaluation.icl import IclOptions, IclTask
    from rag_windows.icl import Template

    demonstrations, test = options.pop("demonstrations"), options.pop("test")
    template, seeds = options.pop("template"), tuple(options.pop("seeds"))
    return IclTask.open(
        str(source.data),
        demonstrations=None if demonstrations is None else Path(demonstrations),
        test=None if test is None else Path(test),
        options=IclOptions(
            seeds=seeds,
            template=None if template is None else Template(template),
            texts=source.limit,
            **options,
        ),
    )


def _path(source: Source) -> Path:
    if source.data is None:
        raise DataError("The run's data file is not known; name it with --data.")
    return Path(source.data)


def _first(task: Task, limit: int | None) -> Task:
    if limit is None or limit >= len(task.examples):
        return task
    if not dataclasses.is_dataclass(task) or isinstance(task, type):
        raise InputError(f"{task.name} can't be shortened; leave --limit out.")
    settings = {**task.settings, "limit": limit}
    return dataclasses.replace(task, examples=tuple(task.examples)[:limit], settings=settings)


def check_pool(corpus: Path | None, pool: str | None) -> None:
    """--corpus and --pool say the same thing in two ways.

    Raises:
        InputError: both are given.
    """
    if corpus is not None and pool is not None:
        raise InputError("--corpus and --pool exclude each other; leave one of them out.")


def check_packages(kind: Kind) -> None:
    """Make sure that what scores and reports a run is installed, before the run.

    Raises:
        MissingExtraError: it is not.
    """
    from rag_windows.evaluation.scores.packages import check_packages as check

    scoring = ("sacrebleu", "spacy") if kind == "inscit" else ()
    check(*scoring, "numpy", "matplotlib")
