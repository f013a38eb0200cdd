"""Asking every question of a task with every arm, so that a run can be stopped at any time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rag_windows.errors import InputError, MissingExtraError, ModelError, RagWindowsError
from rag_windows.evaluation.answering import Answerer, Asked, Generating
from rag_windows.evaluation.arm import Arm
from rag_windows.evaluation.example import Example
from rag_windows.evaluation.folder import RunFolder
from rag_windows.evaluation.options import RunOptions
from rag_windows.evaluation.record import Record
from rag_windows.evaluation.task import Task
from rag_windows.model import WindowedLM
from rag_windows.passage import Passage

Ranking = Callable[[Example], Sequence[Passage]]
"""Gives an example's passages, best first, as many as the deepest arm reads."""

Progress = Callable[[int, int, float], None]
"""Told how many answers are there, how many there will be, and the seconds since the beginning."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run came to.

    Attributes:
        answered: answers that were added.
        kept: those that were there before.
        failed: records of questions without an answer; they are asked again by the next run.
    """

    answered: int
    kept: int
    failed: tuple[Record, ...]


def run(
    lm: WindowedLM,
    task: Task,
    arms: Sequence[Arm],
    ranking: Ranking,
    folder: RunFolder,
    *,
    options: RunOptions,
    answerer: Answerer | None = None,
    progress: Progress | None = None,
) -> Outcome:
    """Answer what the folder lacks, and keep each answer as it comes.

    All arms answer an example before the next one is asked, so an arm finds in the model's cache
    what those before it encoded. An error of one question is kept as its record. What concerns the
    whole run is raised, and all that was answered stays: a model or a package that can't be used, a
    full disk, memory that does not suffice, an interruption.

    Args:
        lm: the model.
        task: brings the examples.
        arms: of the folder's manifest.
        ranking: ranks the passages of an example; asked once for each that lacks an answer.
        folder: begun by `RunFolder.begin`; its manifest says which shard is asked.
        options: how is asked.
        answerer: instead of one that generates.
        progress: told how far it is.
    """
    answerer = Generating(options) if answerer is None else answerer
    work = _Work(lm, arms, ranking, folder, answerer)
    examples = chosen_examples(task, arms, folder)
    begun, total = time.monotonic(), len(examples) * len(arms)
    kept = done = sum(not work.lacks(arm, one) for one in examples for arm in arms)
    if progress is not None:
        progress(done, total, 0.0)
    size = max(1, answerer.batch)
    for start in range(0, len(examples), size):
        block = examples[start : start + size]
        for arm in arms:
            asked = [one for one in block if work.lacks(arm, one)]
            if not asked:
                continue
            work.ask(arm, asked)
            done += len(asked)
            if progress is not None:
                progress(done, total, time.monotonic() - begun)
        work.rankings.clear()
    failed = tuple(
        record
        for arm in arms
        for one in examples
        if (record := folder.records(arm.name)[one.key]).error is not None
    )
    return Outcome(total - kept - len(failed), kept, failed)


def chosen_examples(task: Task, arms: Sequence[Arm], folder: RunFolder) -> list[Example]:
    """The examples of the folder's shard.

    Raises:
        InputError: the folder is of other arms.
    """
    if tuple(arm.name for arm in arms) != folder.manifest.arms:
        raise InputError(f"{folder.path} is a run of {', '.join(folder.manifest.arms)}.")
    shard = folder.manifest.shard
    return list(task.examples) if shard is None else shard.pick(task.examples)


class _Work:
    """Asks examples and keeps what comes."""

    def __init__(
        self,
        lm: WindowedLM,
        arms: Sequence[Arm],
        ranking: Ranking,
        folder: RunFolder,
        answerer: Answerer,
    ) -> None:
        self._lm = lm
        self._ranking = ranking
        self._folder = folder
        self._answerer = answerer
        self.rankings: dict[str, Sequence[Passage] | RagWindowsError] = {}

    def lacks(self, arm: Arm, example: Example) -> bool:
        """Whether there is no answer."""
        record = self._folder.records(arm.name).get(example.key)
        return record is None or record.error is not None

    def ask(self, arm: Arm, examples: Sequence[Example]) -> None:
        """Answer examples that lack an answer."""
        asked: list[Asked] = []
        for example in examples:
            passages = self._passages(example)
            if isinstance(passages, RagWindowsError):
                self._fail(arm, example, passages)
            else:
                asked.append((example, passages[: arm.top_k]))
        if asked:
            self._answer(arm, asked)

    def _passages(self, example: Example) -> Sequence[Passage] | RagWindowsError:
        if example.key not in self.rankings:
            try:
                self.rankings[example.key] = self._ranking(example)
            except RagWindowsError as error:
                _raise_if_general(error)
                self.rankings[example.key] = error
        return self.rankings[example.key]

    def _answer(self, arm: Arm, asked: Sequence[Asked]) -> None:
        try:
            answers = self._answerer.answer(self._lm, arm, asked)
        except RagWindowsError as error:
            _raise_if_general(error)
            if len(asked) == 1:
                self._fail(arm, asked[0][0], error)
                return
            for one in asked:
                self._answer(arm, [one])
            return
        records = [answer.record for answer in answers]
        self._folder.add(records, [text for answer in answers for text in answer.texts])

    def _fail(self, arm: Arm, example: Example, error: RagWindowsError) -> None:
        self._folder.add([Record(example.key, arm.name, "", error=str(error))])


def _raise_if_general(error: RagWindowsError) -> None:
    """Raise what no other question would be spared."""
    if isinstance(error, ModelError | MissingExtraError):
        raise error
