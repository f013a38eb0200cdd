"""All figures of the page, from the journal's records."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.judgement.cases import TASKS
from benchmarks.judgement.entries import BASE
from benchmarks.judgement.estimates import (
    Answers,
    difference,
    retention,
    share,
)
from benchmarks.judgement.journal import Cell, Choice, Cost, Record, Run
from rag_windows.evaluation.statistics.estimate import Estimate


@dataclass(frozen=True, slots=True)
class Row:
    """One cell of the tables.

    Attributes:
        accuracy: share of right answers.
        difference: accuracy minus that of the sequential reader on the same questions.
        retention: right answers for each right one of the sequential reader.
        value: share of right values, the steps before them given.
        cited: share of right answers whose most attended passage states them.
    """

    model: str
    task: str
    passages: int
    label: str
    method: str
    questions: int
    contexts: int
    blind: float
    accuracy: Estimate
    difference: Estimate | None
    retention: Estimate | None
    value: Estimate
    cited: Estimate | None
    encode_s: float | None
    read_s: float


@dataclass(frozen=True, slots=True)
class Spent:
    """Seconds a question, medians."""

    model: str
    passages: int
    label: str
    questions: int
    agreed: int
    encode_s: float
    answer_s: float


class Summary:
    """Rows by what they are about.

    Args:
        records: of a journal; of equal cells the last one counts.
    """

    def __init__(self, records: Iterable[Record]) -> None:
        records = list(records)
        self._cells = {
            (one.model, one.task, one.passages, one.label): one
            for one in records
            if isinstance(one, Cell)
        }
        self.rows = {key: self._row(cell) for key, cell in self._cells.items()}
        self.costs = {
            (one.passages, one.label): _spent(one) for one in records if isinstance(one, Cost)
        }
        self.choices = {one.model: one for one in records if isinstance(one, Choice)}
        self.runs = [one for one in records if isinstance(one, Run)]

    @property
    def sections(self) -> list[tuple[str, str]]:
        """(model, task) of all rows, in the order of the tasks."""
        found = {(model, task) for model, task, _, _ in self.rows}
        return sorted(found, key=lambda pair: (list(TASKS).index(pair[1]), pair[0]))

    def passages(self, model: str, task: str) -> list[int]:
        """Numbers of passages of a section."""
        return sorted({key[2] for key in self.rows if key[:2] == (model, task)})

    def labels(self, model: str, task: str, order: Iterable[str]) -> list[str]:
        """Methods of a section, in that order; others are left out."""
        found = {key[3] for key in self.rows if key[:2] == (model, task)}
        return [label for label in order if label in found]

    def answers(self, model: str, task: str, passages: int, label: str) -> Answers | None:
        """Right answers per context of one cell."""
        cell = self._cells.get((model, task, passages, label))
        return None if cell is None else Answers.of(cell.right)

    def compared(
        self, model: str, task: str, passages: int, label: str, base: str
    ) -> Estimate | None:
        """Accuracy of one method minus that of another on the same questions."""
        own = self.answers(model, task, passages, label)
        other = self.answers(model, task, passages, base)
        return None if own is None or other is None else difference(own, other)

    def as_json(self) -> dict[str, Any]:
        """Everything, for other programs."""
        return {
            "cells": [asdict(row) for row in self.rows.values()],
            "costs": [asdict(cost) for cost in self.costs.values()],
            "calibration": [asdict(choice) for choice in self.choices.values()],
            "runs": [asdict(run) for run in self.runs],
        }

    def _row(self, cell: Cell) -> Row:
        answers = Answers.of(cell.right)
        base = self.answers(cell.model, cell.task, cell.passages, BASE)
        cited = None
        if any("1" in mark or "0" in mark for mark in cell.cited):
            # A wrong answer is no trial of its citation.
            cited = share(Answers.of([mark.replace("-", "") for mark in cell.cited]))
        return Row(
            model=cell.model,
            task=cell.task,
            passages=cell.passages,
            label=cell.label,
            method=cell.method,
            questions=cell.questions,
            contexts=len(cell.right),
            blind=cell.blind,
            accuracy=share(answers),
            difference=None if base is None else difference(answers, base),
            retention=None if base is None else retention(answers, base),
            value=share(Answers.of(cell.value)),
            cited=cited,
            encode_s=cell.encode_s,
            read_s=cell.read_s,
        )


def _spent(cost: Cost) -> Spent:
    return Spent(
        model=cost.model,
        passages=cost.passages,
        label=cost.label,
        questions=len(cost.encode_s),
        agreed=cost.agreed,
        encode_s=statistics.median(cost.encode_s),
        answer_s=statistics.median(cost.answer_s),
    )
