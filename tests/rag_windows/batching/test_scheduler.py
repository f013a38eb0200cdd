"""Questions from many threads at once."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import CancelledError, ThreadPoolExecutor
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor

from rag_windows import GenerationError, LimitError
from rag_windows.batching.loop import BatchLoop
from rag_windows.batching.scheduler import Scheduled, Scheduler
from tests.rag_windows import small
from tests.rag_windows.batching import questions
from tests.rag_windows.batching.questions import PASSAGES

ASK: dict[str, Any] = {"query": "Why?", "passages": PASSAGES[:3], "max_new_tokens": 12}
WAIT = 60


class Gate(LogitsProcessor):
    """Holds a row at its second token until it is opened."""

    def __init__(self) -> None:
        self.reached, self.open = threading.Event(), threading.Event()
        self.calls = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == 2:
            self.reached.set()
            assert self.open.wait(WAIT)
        return scores


def gated(scheduler: Scheduler) -> tuple[Scheduled, Gate]:
    """A question that is in the middle of its answer."""
    gate = Gate()
    future = scheduler.submit({**ASK, "logits_processor": [gate]})
    assert gate.reached.wait(WAIT)
    return future, gate


def test_threads_get_their_own_answers() -> None:
    lm = small.lm()
    asked = questions.mixed(12)
    expected = questions.alone(lm, asked)
    with lm.scheduler(max_rows=5) as scheduler, ThreadPoolExecutor(6) as threads:
        got = list(threads.map(lambda one: scheduler.submit(one).result(WAIT), asked))
    questions.assert_same(got, expected)


def test_a_question_joins_in_the_middle_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    step = BatchLoop.step

    def counted(self: BatchLoop) -> Any:
        sizes.append(len(self.rows))
        return step(self)

    monkeypatch.setattr(BatchLoop, "step", counted)
    lm = small.lm()
    with lm.scheduler() as scheduler:
        first, gate = gated(scheduler)
        second = scheduler.submit({**ASK, "query": "Where?"})
        gate.open.set()
        got = [first.result(WAIT), second.result(WAIT)]
    questions.assert_same(got, questions.alone(lm, [ASK, {**ASK, "query": "Where?"}]))
    assert sizes[0] == 1
    assert max(sizes) == 2


def test_streams_are_the_text() -> None:
    lm = small.lm()
    pieces: list[str] = []
    beams: list[str] = []
    with lm.scheduler() as scheduler:
        answer = scheduler.submit({**ASK, "stop": "\0"}, on_text=pieces.append).result(WAIT)
        other = scheduler.submit({**ASK, "num_beams": 2}, on_text=beams.append).result(WAIT)
    assert "".join(pieces) == answer.text == lm.generate(**ASK).text
    assert len(pieces) > 1
    assert "".join(beams) == other.text == lm.generate(**ASK, num_beams=2).text


def test_cancelling() -> None:
    lm = small.lm()
    with lm.scheduler(max_rows=1) as scheduler:
        running, gate = gated(scheduler)
        waiting = scheduler.submit(ASK)
        assert waiting.cancel()
        assert not running.cancel()
        gate.open.set()
        with pytest.raises(CancelledError):
            waiting.result(WAIT)
        cut = running.result(WAIT)
        assert cut.finish_reason == "cancelled"
        assert cut.token_ids == lm.generate(**ASK).token_ids[: len(cut.token_ids)]
        assert len(cut.token_ids) == 2
        assert scheduler.submit(ASK).result(WAIT).text == lm.generate(**ASK).text


def test_errors_reach_who_asked_and_nobody_else() -> None:
    lm = small.lm()

    def broken(_: str) -> None:
        raise ZeroDivisionError("nobody listens")

    with lm.scheduler() as scheduler:
        with pytest.raises(LimitError):
            scheduler.submit({**ASK, "max_new_tokens": 10**6})
        first, gate = gated(scheduler)
        bad = scheduler.submit({**ASK, "query": "Bad?"}, on_text=broken)
        gate.open.set()
        with pytest.raises(ZeroDivisionError):
            bad.result(WAIT)
        assert first.result(WAIT).token_ids == lm.generate(**ASK).token_ids


def test_a_pass_that_fails_ends_its_rows_and_the_next_question_is_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lm = small.lm()
    with lm.scheduler() as scheduler:
        first, gate = gated(scheduler)
        with monkeypatch.context() as patch:

            def fails(*_: Any, **__: Any) -> None:
                raise MemoryError("no room")

            patch.setattr("rag_windows.batching.layout.RowCaches.room", fails)
            gate.open.set()
            with pytest.raises(MemoryError):
                first.result(WAIT)
        assert scheduler.submit(ASK).result(WAIT).token_ids == lm.generate(**ASK).token_ids


def test_the_worker_ends_when_nobody_asks() -> None:
    scheduler = small.lm().scheduler()
    scheduler.submit(ASK).result(WAIT)
    worker = scheduler._worker
    if worker is not None:
        worker.join(WAIT)
    assert scheduler._worker is None
    assert scheduler.submit(ASK).result(WAIT).text
    scheduler.close()
    with pytest.raises(GenerationError, match="closed"):
        scheduler.submit(ASK)


def test_closing_can_cancel() -> None:
    scheduler = small.lm().scheduler(max_rows=1)
    running, gate = gated(scheduler)
    waiting = scheduler.submit(ASK)
    closer = threading.Thread(target=scheduler.close, kwargs={"cancel": True})
    closer.start()
    while not waiting.cancelled():
        pass
    gate.open.set()
    closer.join(WAIT)
    assert running.result(WAIT).finish_reason == "cancelled"


def test_tasks_can_wait_for_it() -> None:
    lm = small.lm()
    asked = questions.mixed(4)

    async def ask() -> list[Any]:
        with lm.scheduler() as scheduler:
            return await asyncio.gather(
                *(asyncio.wrap_future(scheduler.submit(one)) for one in asked)
            )

    questions.assert_same(asyncio.run(ask()), questions.alone(lm, asked))
