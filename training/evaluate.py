"""Measures a reader: `python -m training.evaluate --model tiny-reader --passages 1 2 4 8`.

Greedy answers by `WindowedLM.generate` on held-out names and phrasings, exact match (for two hops:
the entity named first and the value at the end), for each task, number of passages and method
(`sequential`, `pcw`, `ape:T:S`), with Wilson's 95% intervals and the baseline of a reader that is
blind to the entity. All methods see the same cases. `--jobs N` spreads the cells over N processes
with one thread each; the cases and answers stay the same.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch

from rag_windows import APE, Passage, WindowedLM
from rag_windows.methods import Method, resolve
from training.intervals import wilson
from training.tasks import FEWEST, TASKS, TRAINED, Case, draw_case

log = logging.getLogger("training")


@dataclass(frozen=True, slots=True)
class Cell:
    """One figure of the table; `low` and `high` are its 95% interval, `seconds` what it took."""

    task: str
    passages: int
    method: str
    right: int
    total: int
    accuracy: float
    low: float
    high: float
    blind: float
    seconds: float


def method_of(label: str) -> Method:
    """The method behind `sequential`, `pcw` or `ape:T:S`."""
    name, *numbers = label.split(":")
    if name == "ape" and numbers:
        return APE(temperature=float(numbers[0]), scale=float(numbers[1]))
    return resolve(name)


def is_right(lm: WindowedLM, case: Case, method: Method) -> bool:
    """Whether the greedy answer to a case equals the expected one."""
    passages = [Passage(text, title=title) for title, text in case.passages]
    generation = lm.generate(
        list(case.messages),
        passages,
        method=method,
        max_new_tokens=32,
        do_sample=False,
        citations=False,
    )
    return case.accepts(generation.text)


def pairs(tasks: Sequence[str], sizes: Sequence[int]) -> list[tuple[str, int]]:
    """(task, passages) of every cell that can be asked."""
    return [(task, size) for task in tasks for size in sizes if size >= FEWEST.get(task, 1)]


def evaluate_pair(
    lm: WindowedLM, task: str, size: int, methods: Sequence[str], questions: int, seed: int
) -> list[Cell]:
    """The cells of one task and number of passages; the cases depend on these and the seed."""
    rng = np.random.default_rng([seed, list(TASKS).index(task), size])
    cases = [draw_case(rng, task, size) for _ in range(questions)]
    blind = float(np.mean([case.blind for case in cases]))
    cells = []
    for label in methods:
        method, begun = method_of(label), time.monotonic()
        right = sum(is_right(lm, case, method) for case in cases)
        low, high = wilson(right, questions)
        seconds = time.monotonic() - begun
        accuracy = right / questions
        cell = Cell(task, size, label, right, questions, accuracy, low, high, blind, seconds)
        log.info("%s", json.dumps(asdict(cell)))
        cells.append(cell)
    return cells


def evaluate(
    lm: WindowedLM,
    tasks: Sequence[str],
    sizes: Sequence[int],
    methods: Sequence[str],
    questions: int,
    seed: int,
) -> list[Cell]:
    """Every cell of the table."""
    cells = []
    for task, size in pairs(tasks, sizes):
        cells += evaluate_pair(lm, task, size, methods, questions, seed)
    return cells


_OWN: list[WindowedLM] = []


def _start(model: str, device: str | None) -> None:
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    _OWN.append(WindowedLM.from_pretrained(model, device_map=device))


def _work(task: str, size: int, methods: Sequence[str], questions: int, seed: int) -> list[Cell]:
    return evaluate_pair(_OWN[0], task, size, methods, questions, seed)


def evaluate_in_processes(
    model: str,
    device: str | None,
    jobs: int,
    tasks: Sequence[str],
    sizes: Sequence[int],
    methods: Sequence[str],
    questions: int,
    seed: int,
) -> list[Cell]:
    """As `evaluate`, by `jobs` processes that each load the model."""
    context = get_context("spawn")
    with ProcessPoolExecutor(jobs, context, _start, (model, device)) as pool:
        # The long ones first, so that no process is left alone with them at the end.
        work = sorted(pairs(tasks, sizes), key=lambda pair: -pair[1])
        done = {pair: pool.submit(_work, *pair, tuple(methods), questions, seed) for pair in work}
        return [cell for pair in pairs(tasks, sizes) for cell in done[pair].result()]


def markdown(cells: Sequence[Cell]) -> str:
    """The table: a row for each task and method, a column for each number of passages."""
    sizes = sorted({cell.passages for cell in cells})
    lines = [
        "| task | method | " + " | ".join(str(size) for size in sizes) + " |",
        "|---|---|" + "---|" * len(sizes),
    ]
    for task in dict.fromkeys(cell.task for cell in cells):
        own = [cell for cell in cells if cell.task == task]
        for method in dict.fromkeys(cell.method for cell in own):
            shown = {
                c.passages: f"{100 * c.accuracy:.0f} ({100 * c.low:.0f}-{100 * c.high:.0f})"
                for c in own
                if c.method == method
            }
            lines.append(_row(task, method, [shown.get(size, "") for size in sizes]))
        blind = {c.passages: f"{100 * c.blind:.0f}" for c in own}
        baseline = [blind.get(size, "") for size in sizes]
        lines.append(_row(task, "*entity-blind baseline*", baseline))
    return "\n".join(lines) + "\n"


def _row(task: str, method: str, figures: Sequence[str]) -> str:
    return f"| {task} | {method} | " + " | ".join(figures) + " |"


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m training.evaluate", description=__doc__)
    parser.add_argument("--model", default="tiny-reader")
    parser.add_argument(
        "--tasks",
        nargs="+",
        choices=list(TASKS),
        help="default: those that a shipped model was trained for, all for any other",
    )
    parser.add_argument("--passages", nargs="+", type=int, default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--methods", nargs="+", default=["sequential", "pcw", "ape:0.9:0.9"])
    parser.add_argument("--questions", type=int, default=100, help="per cell")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default=None)
    parser.add_argument("--jobs", type=int, default=1, help="processes, with one thread each")
    parser.add_argument("--json", type=Path, default=None, help="write all cells to this file")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    tasks = options.tasks or TRAINED.get(options.model, tuple(TASKS))
    begun = time.monotonic()
    cells = evaluate_in_processes(
        options.model,
        options.device,
        options.jobs,
        tasks,
        options.passages,
        options.methods,
        options.questions,
        options.seed,
    )
    seconds = time.monotonic() - begun
    print(markdown(cells))
    print(f"{options.questions} questions a cell, {seconds:.0f} s in all.")
    if options.json is not None:
        rows = {"seconds": seconds, "cells": [asdict(cell) for cell in cells]}
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
