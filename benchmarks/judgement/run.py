"""All pieces of work, spread over processes, kept as they come."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

import torch

from benchmarks.judgement.calibrating import calibrate
from benchmarks.judgement.cases import FEWEST
from benchmarks.judgement.costs import measure
from benchmarks.judgement.entries import (
    CALIBRATED,
    DEAR,
    LINK_SHARES,
    Entry,
    linked,
    shares_windows,
)
from benchmarks.judgement.journal import Cell, Choice, Cost, Journal, Record, Run
from benchmarks.judgement.reading import Reader
from benchmarks.judgement.work import Work, fill
from rag_windows import WindowedLM
from rag_windows.evaluation.machine import machine
from rag_windows.methods import PCW, Method, from_description

log = logging.getLogger("judgement")

COST_TASK = "single-hop"
SWEEP_TASK, SWEEP_PASSAGES = "two-hop", 8
"""Where the share of linked tokens is varied."""

_WEIGHT = {"deep-thinking": 6, "ensemble": 6, "linked": 4, "codebook": 4, "sequential": 3}
"""How long they take, roughly: the longest go first, so that no process ends alone with one."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be run.

    Attributes:
        models: per task, the models that are asked; the first one is measured for cost, too.
        passages: numbers of them.
        dear: those among them over which the families in `DEAR` are asked.
        entries: the methods.
        questions: of each cell.
        timed: questions of each cost.
        examples: those that calibration sees, for each model.
        seed: of the questions.
        jobs: processes with one thread each.
    """

    models: dict[str, tuple[str, ...]]
    passages: tuple[int, ...]
    dear: tuple[int, ...]
    entries: tuple[Entry, ...]
    questions: int
    timed: int
    examples: int
    seed: int
    jobs: int

    def settings(self) -> dict[str, Any]:
        """What a journal's records depend on, the methods aside, which each record holds itself."""
        names = sorted({name for models in self.models.values() for name in models})
        return {
            "questions": self.questions,
            "timed": self.timed,
            "examples": self.examples,
            "seed": self.seed,
            "weights": {name: digest(name) for name in names},
        }


def digest(model: str) -> str:
    """Of a model's weights, as loaded."""
    state = WindowedLM.from_pretrained(model).model.state_dict()
    total = hashlib.sha256()
    for name in sorted(state):
        total.update(name.encode())
        total.update(state[name].float().numpy().tobytes())
    return total.hexdigest()[:16]


def run(plan: Plan, journal: Journal) -> None:
    """Fill in what the journal does not hold yet."""
    begun = time.monotonic()
    before = len(journal.records)
    with _pool(plan.jobs) as pool:
        _keep(journal, pool, _calibrate, list(_choices(plan, journal)))
        works = sorted(_works(plan, journal), key=lambda pair: pair[0])
        _keep(journal, pool, _fill, [(work,) for _, work in works])
        _keep(journal, pool, _measure, [(work,) for work in _timed(plan, journal)])
    if len(journal.records) > before:
        journal.add(Run(time.monotonic() - begun, plan.jobs, machine()))


@contextmanager
def _pool(jobs: int) -> Iterator[ProcessPoolExecutor | None]:
    """So many processes; None for one, which is this one."""
    if jobs == 1:
        yield None
        return
    with ProcessPoolExecutor(jobs, get_context("spawn"), initializer=_start) as pool:
        yield pool


def _keep(
    journal: Journal,
    pool: ProcessPoolExecutor | None,
    task: Callable[..., Sequence[Record]],
    pieces: Sequence[tuple[Any, ...]],
) -> None:
    """Do every piece of a task and keep what comes, as it comes."""
    begun = time.monotonic()
    for number, records in enumerate(_done(pool, task, pieces), start=1):
        for record in records:
            journal.add(record)
            log.info("%s", shown(record))
        log.info("%d of %d, %.0f s", number, len(pieces), time.monotonic() - begun)


def _done(
    pool: ProcessPoolExecutor | None,
    task: Callable[..., Sequence[Record]],
    pieces: Sequence[tuple[Any, ...]],
) -> Iterator[Sequence[Record]]:
    if pool is None:
        yield from (task(*piece) for piece in pieces)
        return
    futures = [pool.submit(task, *piece) for piece in pieces]
    try:
        yield from (future.result() for future in as_completed(futures))
    finally:
        # Otherwise a pool that is left by an error works off everything that waits.
        for future in futures:
            future.cancel()


def shown(record: Record) -> str:
    """A record in a line."""
    if isinstance(record, Cell):
        right = sum(mark.count("1") for mark in record.right)
        return (
            f"{record.model} {record.task} {record.passages} {record.label}: "
            f"{100 * right / record.questions:.1f}% of {record.questions}, "
            f"encode {record.encode_s or 0:.1f} s, read {record.read_s:.1f} s"
        )
    if isinstance(record, Cost):
        encode = sorted(record.encode_s)[len(record.encode_s) // 2]
        answer = sorted(record.answer_s)[len(record.answer_s) // 2]
        return f"{record.passages} {record.label}: encode {encode:.3f} s, answer {answer:.3f} s"
    return repr(record)


def _choices(
    plan: Plan, journal: Journal
) -> Iterator[tuple[str, int, int, dict[str, tuple[int, ...]]]]:
    if CALIBRATED not in [entry.label for entry in plan.entries]:
        return
    sizes: dict[str, dict[str, tuple[int, ...]]] = {}
    for task, models in plan.models.items():
        for model in models:
            own = tuple(n for n in plan.passages if n >= FEWEST.get(task, 1))
            sizes.setdefault(model, {})[task] = own
    for model, of_task in sizes.items():
        if calibrated(journal, model) is None:
            yield model, plan.examples, plan.seed, of_task


def calibrated(journal: Journal, model: str) -> Method | None:
    """The best setting that calibration found."""
    for record in journal.records:
        if isinstance(record, Choice) and record.model == model:
            return from_description(json.loads(record.description))
    return None


def _works(plan: Plan, journal: Journal) -> Iterator[tuple[tuple[bool, int], Work]]:
    """Work to do, methods over the same windows together, with its place in the order.

    What most people use comes first, in case nobody waits for the rest; of equals the longest, so
    that no process ends alone with one.
    """
    plain = PCW()
    done = {
        (cell.model, cell.task, cell.passages, cell.label, cell.method)
        for cell in journal.records
        if isinstance(cell, Cell)
    }
    for task, models in plan.models.items():
        for model in models:
            tuned = calibrated(journal, model)
            for passages in plan.passages:
                if passages < FEWEST.get(task, 1):
                    continue
                together: dict[str, list[tuple[str, Method]]] = {}
                for entry in _entries(plan, task, passages):
                    method = entry.make(tuned, passages)
                    if (model, task, passages, entry.label, repr(method)) not in done:
                        kind = "plain" if shares_windows(method, plain) else entry.family
                        together.setdefault(kind, []).append((entry.label, method))
                for kind, methods in together.items():
                    work = Work(model, task, passages, plan.questions, plan.seed, tuple(methods))
                    yield (kind in DEAR, -passages * _WEIGHT.get(kind, 2)), work


def _entries(plan: Plan, task: str, passages: int) -> tuple[Entry, ...]:
    wanted = [e for e in plan.entries if e.family not in DEAR or passages in plan.dear]
    if (task, passages) == (SWEEP_TASK, SWEEP_PASSAGES):
        known = {entry.label for entry in wanted}
        if any(entry.family == "linked" for entry in wanted):
            shares = (entry for share in LINK_SHARES for entry in linked(share))
            wanted += [entry for entry in shares if entry.label not in known]
    return tuple(wanted)


def _timed(plan: Plan, journal: Journal) -> Iterator[Work]:
    if COST_TASK not in plan.models:
        return
    model = plan.models[COST_TASK][0]
    tuned = calibrated(journal, model)
    done = {
        (cost.model, cost.passages, cost.label, cost.method)
        for cost in journal.records
        if isinstance(cost, Cost)
    }
    for passages in sorted(plan.passages, reverse=True):
        methods = [(entry.label, entry.make(tuned, passages)) for entry in plan.entries]
        left = [m for m in methods if (model, passages, m[0], repr(m[1])) not in done]
        if left:
            # All methods in one piece, so that they take turns.
            yield Work(model, COST_TASK, passages, plan.timed, plan.seed + 1, tuple(left))


_READERS: dict[str, Reader] = {}


def _start() -> None:
    torch.set_num_threads(1)


def _reader(model: str) -> Reader:
    if model not in _READERS:
        _READERS[model] = Reader(WindowedLM.from_pretrained(model))
    return _READERS[model]


def _calibrate(
    model: str, examples: int, seed: int, sizes: dict[str, tuple[int, ...]]
) -> Sequence[Record]:
    return [calibrate(_reader(model).lm, model, examples, seed, sizes)]


def _fill(work: Work) -> Sequence[Record]:
    return fill(_reader(work.model), work)


def _measure(work: Work) -> Sequence[Record]:
    return measure(_reader(work.model), work)
