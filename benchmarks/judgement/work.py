"""One piece of work: a task over a number of passages, by methods that share their windows."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.judgement.cases import draw_groups
from benchmarks.judgement.ensembles import read_ensembles
from benchmarks.judgement.entries import BASE, CALIBRATED, PLAIN, shares_windows
from benchmarks.judgement.journal import Cell
from benchmarks.judgement.reading import Asked, Reader, Reading
from rag_windows.methods import Method
from rag_windows.prefill import EncodedContext

CITED_TASK = "single-hop"
"""The task whose answers each stand in one passage, so that a citation is right or wrong."""

CITING = (BASE, PLAIN, "ape", CALIBRATED, "structured-prompting", "mateicl")
"""The methods whose citations are looked at; to measure attention takes time."""


@dataclass(frozen=True, slots=True)
class Work:
    """Cells to be filled: (label, method) of each, over the same questions."""

    model: str
    task: str
    passages: int
    questions: int
    seed: int
    methods: tuple[tuple[str, Method], ...]


@dataclass(slots=True)
class _Column:
    """One method's answers so far."""

    readings: list[list[Reading]]
    encode_s: float | None = None
    read_s: float = 0.0


def fill(reader: Reader, work: Work) -> list[Cell]:
    """Read every question by every method."""
    columns = {label: _Column([]) for label, _ in work.methods}
    ensembles = {label: method for label, method in work.methods if method.combination is not None}
    blind: list[float] = []
    asked: list[Sequence[Asked]] = []
    for group in draw_groups(work.task, work.passages, work.questions, work.seed):
        prepared = reader.prepare(group)
        blind += [question.blind for question in group.questions]
        asked.append(prepared.asked)
        encoded: list[EncodedContext] = []
        for label, method in work.methods:
            if method.combination is not None:
                continue
            column = columns[label]
            begun = time.perf_counter()
            shared = next((one for one in encoded if shares_windows(one.method, method)), None)
            if shared is None:
                shared = reader.encode(prepared, method)
                encoded.append(shared)
                column.encode_s = (column.encode_s or 0.0) + time.perf_counter() - begun
                begun = time.perf_counter()
            column.readings.append(
                reader.read(
                    replace(shared, method=method),
                    prepared,
                    citations=work.task == CITED_TASK and label in CITING,
                )
            )
            column.read_s += time.perf_counter() - begun
        if ensembles:
            begun = time.perf_counter()
            answers = read_ensembles(reader, prepared, list(ensembles.values()))
            seconds = (time.perf_counter() - begun) / len(ensembles)
            for label, readings in zip(ensembles, answers, strict=True):
                columns[label].readings.append(readings)
                columns[label].read_s += seconds
    return [
        _cell(work, label, repr(method), columns[label], asked, blind)
        for label, method in work.methods
    ]


def _cell(
    work: Work,
    label: str,
    method: str,
    column: _Column,
    asked: Sequence[Sequence[Asked]],
    blind: Sequence[float],
) -> Cell:
    def marks(name: str) -> tuple[str, ...]:
        return tuple(
            "".join("01"[getattr(one, name)] for one in readings) for readings in column.readings
        )

    cited: tuple[str, ...] = ()
    if any(one.cited is not None for readings in column.readings for one in readings):
        cited = tuple(
            "".join(
                "01"[one.cited == question.passage] if one.right else "-"
                for one, question in zip(readings, questions, strict=True)
            )
            for readings, questions in zip(column.readings, asked, strict=True)
        )
    return Cell(
        model=work.model,
        task=work.task,
        passages=work.passages,
        label=label,
        method=method,
        right=marks("right"),
        value=marks("value"),
        cited=cited,
        blind=sum(blind) / len(blind),
        encode_s=column.encode_s,
        read_s=column.read_s,
    )
