"""Many threads with different windows, rules and methods on one model equal their serial runs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch

from rag_windows import Linked, Method, Sequential, WindowedLM

from . import dense, engine, tolerances, zoo
from .cases import Case, case
from .dense import Rule

pytestmark = pytest.mark.usefixtures("eager_switching")
THREADS = 16
ROUNDS = 2
FORMS: tuple[Any, ...] = ("as used", "as printed", "fixed ratio")
Answer = tuple[torch.Tensor, list[int]]


def job(number: int) -> tuple[Case, Method]:
    """Case and method of thread `number`; no two are alike."""
    lengths = tuple(1 + (number * 7 + 5 * i) % 23 for i in range(1 + number % 5))
    one = case(number % 4 * 3, lengths, 2 + number % 6, seed=100 + 13 * number)
    if number % 8 == 7:
        return one, Sequential()
    if number % 8 == 5:
        return one, Linked(0.5)
    if number % 8 == 3:
        return one, engine.method(Rule())
    rule = Rule(0.5 + 0.05 * number, 0.6 + 0.04 * number, FORMS[number % 3])
    return one, engine.method(rule)


def answer(lm: WindowedLM, number: int) -> Answer:
    torch.set_num_threads(1)  # OpenMP keeps this number for each thread.
    one, method = job(number)
    context = lm.encode_ids(one.prefix, one.windows, method=method)
    rows = lm.logits(context, one.query)
    return rows, lm.generate_ids(context, one.query, max_new_tokens=5)


def run_all(jobs: list[Callable[[], Any]]) -> list[Any]:
    """Run every job in a thread of its own, all set off at once."""
    gate = threading.Barrier(len(jobs))

    def at_once(work: Callable[[], Any]) -> Any:
        gate.wait(timeout=30)
        return work()

    with ThreadPoolExecutor(max_workers=len(jobs)) as pool:
        return [future.result(timeout=120) for future in [pool.submit(at_once, w) for w in jobs]]


@pytest.mark.parametrize("name", ["llama", "gemma3_text-sliding", "gpt_oss"])
def test_threads_equal_serial(name: str) -> None:
    model = zoo.build(zoo.BY_NAME[name])
    lm = engine.wrap(model)
    serial = [answer(lm, number) for number in range(THREADS)]
    tokens = zoo.ids(40, 77)
    plain = dense.plain_logits(model, tokens, 40)

    def repeat(number: int) -> list[Answer]:
        return [answer(lm, number) for _ in range(ROUNDS)]

    def plain_rows() -> list[torch.Tensor]:
        torch.set_num_threads(1)
        return [dense.plain_logits(model, tokens, 40) for _ in range(10 * ROUNDS)]

    jobs: list[Callable[[], Any]] = [partial(repeat, number) for number in range(THREADS)]
    *threaded, beside = run_all([*jobs, plain_rows])
    for (rows, generated), rounds in zip(serial, threaded, strict=True):
        for got_rows, got_generated in rounds:
            assert tolerances.gap(got_rows, rows) == 0.0
            assert got_generated == generated
    assert all(torch.equal(rows, plain) for rows in beside)


def test_serial_jobs_differ() -> None:
    """The jobs' answers are far apart, so that a mixed-up layout could not pass."""
    lm = engine.shared("llama")
    last = [answer(lm, number)[0][-1] for number in range(THREADS)]
    for i, first in enumerate(last):
        assert all(tolerances.gap(first, second) > tolerances.MATTERS for second in last[:i])


def test_one_context_read_by_many_threads() -> None:
    lm = engine.shared("llama")
    one, method = job(1)
    context = lm.encode_ids(one.prefix, one.windows, method=method)
    queries = [zoo.ids(1 + number % 7, 500 + number) for number in range(THREADS)]

    def read(query: list[int]) -> Answer:
        torch.set_num_threads(1)
        return lm.logits(context, query), lm.generate_ids(context, query, max_new_tokens=4)

    serial = [read(query) for query in queries]
    threaded = run_all([partial(read, query) for query in queries])
    for (rows, generated), (got_rows, got_generated) in zip(serial, threaded, strict=True):
        assert tolerances.gap(got_rows, rows) == 0.0
        assert got_generated == generated
