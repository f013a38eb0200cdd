"""One scheduler for all who ask a model, and what a lone question gets."""

from __future__ import annotations

import contextvars
import gc
import os
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor

from rag_windows import InputError, WindowedLM
from rag_windows.batching.loop import BatchLoop
from rag_windows.batching.scheduler import BESIDE
from rag_windows.integration import Calls
from tests.rag_windows import small
from tests.rag_windows.batching import questions
from tests.rag_windows.batching.questions import PASSAGES

ASK: dict[str, Any] = {"query": "Why?", "passages": PASSAGES[:3], "max_new_tokens": 12}
WAIT = 60


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows took part in each step of a batch."""
    made: list[int] = []
    step = BatchLoop.step

    def counted(self: BatchLoop) -> Any:
        if self.rows:
            made.append(len(self.rows))
        return step(self)

    monkeypatch.setattr(BatchLoop, "step", counted)
    return made


def own_lm() -> WindowedLM:
    return WindowedLM.from_pretrained(small.model(), tokenizer=small.tokenizer())


def test_who_asks_for_as_many_rows_gets_the_same() -> None:
    lm = own_lm()
    first = lm.shared_scheduler(max_rows=8)
    assert lm.shared_scheduler(max_rows=8) is first
    assert lm.shared_scheduler(max_rows=9) is not first
    # Another cache is another tenant's: its windows are not for this one's questions.
    assert lm.with_cache(True).shared_scheduler(max_rows=8) is not first
    first.close()
    again = lm.shared_scheduler(max_rows=8)
    assert again is not first
    assert again.answer(ASK).text == lm.generate(**ASK).text
    with pytest.raises(InputError, match="max_rows"):
        lm.shared_scheduler(max_rows=0)


def test_it_keeps_no_model_alive() -> None:
    lm = own_lm()
    lm.shared_scheduler().submit(ASK).result(WAIT)
    gone = weakref.ref(lm)
    del lm
    for thread in threading.enumerate():
        if thread.name == "rag-windows-batch":
            thread.join(WAIT)
    end = time.monotonic() + WAIT
    while gone() is not None and time.monotonic() < end:
        gc.collect()
        time.sleep(0.01)
    assert gone() is None


def test_a_lone_question_is_answered_as_generate_does(steps: list[int]) -> None:
    lm, crowd = own_lm(), Calls()
    scheduler = lm.shared_scheduler()
    pieces: list[str] = []
    with crowd.entered():
        answers = [
            scheduler.answer(ASK, lone=crowd.lone),
            scheduler.submit(ASK, lone=crowd.lone, on_text=pieces.append).result(WAIT),
        ]
    assert not steps
    assert answers[0].citations == answers[1].citations == lm.generate(**ASK).citations
    assert "".join(pieces) == answers[1].text
    assert len(pieces) > 1
    with crowd.entered(), crowd.entered():
        scheduler.answer(ASK, lone=crowd.lone)
    scheduler.answer(ASK)
    assert set(steps) == {1}


class Slow(LogitsProcessor):
    """Waits at the second token until it is let go."""

    def __init__(self) -> None:
        self.reached, self.open = threading.Event(), threading.Event()
        self.calls = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == 2:
            self.reached.set()
            assert self.open.wait(WAIT)
        return scores


@pytest.mark.parametrize("waiting", [False, True])
def test_those_that_come_while_a_lone_one_is_answered_share_steps(
    steps: list[int], waiting: bool
) -> None:
    lm, slow = own_lm(), Slow()
    scheduler = lm.shared_scheduler()
    first = {**ASK, "logits_processor": [slow]}
    asked = questions.mixed(4)
    with ThreadPoolExecutor(1) as threads:
        if waiting:
            lone = threads.submit(scheduler.answer, first, lone=lambda: True)
        else:
            lone = scheduler.submit(first, lone=lambda: True)
        assert slow.reached.wait(WAIT)
        assert not steps
        others = [scheduler.submit(one, lone=lambda: True) for one in asked]
        got = [one.result(WAIT) for one in others]
        slow.open.set()
        assert lone.result(WAIT).text == lm.generate(**ASK).text
    questions.assert_same(got, questions.alone(lm, asked))
    assert max(steps) > 1


def test_a_lone_question_that_fails_leaves_nothing_behind() -> None:
    scheduler = own_lm().shared_scheduler()

    def fails(done: int, total: int) -> None:
        raise ZeroDivisionError("on purpose")

    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            scheduler.answer({**ASK, "on_encoded": fails}, lone=lambda: True)
    assert scheduler._idle(lambda: True)


def test_questions_of_a_kind_that_stands_alone_wait_in_line() -> None:
    lm = own_lm()
    scheduler = lm.shared_scheduler()
    lock, running, most = threading.Lock(), 0, 0
    full = threading.Event()

    class Counted(LogitsProcessor):
        def __init__(self) -> None:
            self.began = False

        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            nonlocal running, most
            if not self.began:
                self.began = True
                with lock:
                    running += 1
                    most = max(most, running)
                    if running == BESIDE:
                        full.set()
                assert full.wait(WAIT)
            return scores

    def left(_: Any) -> None:
        nonlocal running
        with lock:
            running -= 1

    asked = []
    for _ in range(3 * BESIDE):
        request = {**ASK, "fallback": "sequential", "logits_processor": [Counted()]}
        asked.append(scheduler.submit(request))
        asked[-1].add_done_callback(left)
    last = scheduler.submit({**ASK, "fallback": "sequential"})
    assert last.cancel(), "one that waits can be cancelled at once"
    for one in asked:
        assert one.result(WAIT).text
    # The callback runs a moment after the answer, when the next may have begun already.
    assert BESIDE <= most <= 2 * BESIDE


def test_a_callback_may_ask_too() -> None:
    """Without deadlock: the worker can't answer what it waits for itself."""
    lm = own_lm()
    scheduler = lm.shared_scheduler()
    inner: list[str] = []

    def told(done: int, total: int) -> None:
        inner.append(scheduler.answer(ASK).text)

    for kind in ({}, {"fallback": "sequential"}):
        request = {**ASK, "query": "Where?", "on_encoded": told, **kind}
        assert scheduler.submit(request).result(WAIT).text
    assert set(inner) == {lm.generate(**ASK).text}


@pytest.mark.parametrize("kind", [{}, {"fallback": "sequential"}])
def test_callbacks_run_in_the_context_of_who_asks(kind: dict[str, Any]) -> None:
    variable = contextvars.ContextVar("variable", default="unset")
    scheduler = own_lm().shared_scheduler()
    seen: list[str] = []
    for value in ("one", "two"):
        variable.set(value)
        request = {**ASK, "on_encoded": lambda *_: seen.append(variable.get()), **kind}
        scheduler.submit(request, on_text=lambda _: seen.append(variable.get())).result(WAIT)
        assert set(seen) == {value}
        assert len(seen) > 2
        seen.clear()


AT_THE_END = """
import threading
import time
from tests.rag_windows import small
begun = threading.Event()
request = dict(query="Why?", passages=["a", "b"], min_new_tokens=400, max_new_tokens=400)
scheduler = small.lm().shared_scheduler()
for kind in ({}, {"fallback": "sequential"}):
    scheduler.submit({**request, **kind}, on_text=lambda _: begun.set())
begun.wait(60)
"""


def test_a_process_that_ends_stops_what_it_asked() -> None:
    """A thread cut off inside of a tensor operation would abort it."""
    ended = subprocess.run(
        [sys.executable, "-c", AT_THE_END],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stderr
