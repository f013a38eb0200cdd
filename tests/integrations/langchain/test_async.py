"""Beside an event loop: it stays free, cancelling stops the work, errors come at once."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, cast

import pytest
import torch
from transformers import LogitsProcessor

from langchain_rag_windows import ChatRagWindows, RagWindows
from langchain_rag_windows.errors import RequestError, RequestTimeoutError
from tests.integrations.langchain.drawn import Drawn, N, answered, reader, texts_of

LONG: dict[str, Any] = {"min_new_tokens": 24, "max_tokens": 24}
Model = ChatRagWindows | RagWindows


class Tokens(LogitsProcessor):
    """Counts generated tokens, tells when the first came, and can be slow or fail."""

    def __init__(self, pause: float = 0.0, fails: bool = False) -> None:
        self.count = 0
        self.first = threading.Event()
        self._pause = pause
        self._fails = fails

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.count += 1
        self.first.set()
        if self._fails:
            raise RuntimeError("The accelerator fell off the bus.")
        time.sleep(self._pause)
        return scores


def chat(**arguments: Any) -> ChatRagWindows:
    return ChatRagWindows(lm=reader(), max_tokens=16, **arguments)


def text(**arguments: Any) -> RagWindows:
    return RagWindows(lm=reader(), max_tokens=16, **arguments)


async def streamed(model: Model, drawn: Drawn, **options: Any) -> str:
    pieces = model.astream(drawn.question, documents=drawn.documents, **options)
    return "".join([piece if isinstance(piece, str) else piece.text async for piece in pieces])


async def asked(model: Model, drawn: Drawn, **options: Any) -> str:
    answer = await model.ainvoke(drawn.question, documents=drawn.documents, **options)
    return answer if isinstance(answer, str) else str(answer.text)


WAYS = [(chat, asked), (chat, streamed), (text, asked), (text, streamed)]


@pytest.mark.parametrize(("model", "way"), WAYS)
def test_all_ways_answer_right(model: Callable[[], Model], way: Callable[..., Any]) -> None:
    for place in range(0, N, 5):
        drawn = answered(place)
        assert asyncio.run(way(model(), drawn)) == drawn.answer


async def worst_gap(work: Awaitable[Any]) -> float:
    """The most CPU seconds that the process spent between two ticks of an event loop's clock.

    CPU time, since on a busy machine the whole process may have to wait, and no code is to blame.
    """
    worst, last, done = 0.0, time.process_time(), False

    async def tick() -> None:
        nonlocal worst, last
        while not done:
            await asyncio.sleep(0.001)
            now = time.process_time()
            worst, last = max(worst, now - last), now

    ticking = asyncio.create_task(tick())
    await asyncio.sleep(0)
    await work
    done = True
    await ticking
    return worst


@pytest.mark.parametrize(("model", "way"), WAYS)
def test_the_event_loop_keeps_ticking(model: Callable[[], Model], way: Callable[..., Any]) -> None:
    drawn = answered(0)
    made = model()
    asyncio.run(way(made, drawn))  # loads whatever is loaded on first use
    started = time.process_time()
    asyncio.run(way(made, drawn, **LONG))
    token = (time.process_time() - started) / 24
    assert asyncio.run(worst_gap(way(made, drawn, **LONG))) < 0.05 + token


def test_a_blocked_event_loop_would_be_seen() -> None:
    async def blocking() -> None:
        chat().invoke("Who?", documents=texts_of(answered(0).documents), **LONG)

    assert asyncio.run(worst_gap(blocking())) > 0.1


@pytest.mark.parametrize(("model", "way"), WAYS)
def test_cancelling_stops_within_a_token(
    model: Callable[[], Model], way: Callable[..., Any]
) -> None:
    tokens = Tokens(pause=0.02)

    async def cancel() -> int:
        options: dict[str, Any] = {
            "min_new_tokens": 400,
            "max_tokens": 400,
            "logits_processor": [tokens],
        }
        task = asyncio.create_task(way(model(), answered(0), **options))
        while not tokens.first.is_set():
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return tokens.count

    at_cancel = asyncio.run(cancel())
    time.sleep(0.3)
    assert tokens.count <= at_cancel + 2  # the one under way, and the one whose end is awaited


def test_closing_a_stream_stops_it_too() -> None:
    tokens = Tokens(pause=0.02)
    options: dict[str, Any] = {
        "min_new_tokens": 400,
        "max_tokens": 400,
        "logits_processor": [tokens],
    }

    async def leave() -> int:
        pieces = chat().astream("Who?", documents=["A text."], **options)
        async with aclosing(cast(Any, pieces)) as open_pieces:
            async for _ in cast(AsyncIterator[Any], open_pieces):
                break
        return tokens.count

    left = asyncio.run(leave())
    time.sleep(0.3)
    assert tokens.count <= left + 2
    before = tokens.count
    stream = chat().stream("Who?", documents=["A text."], **options)
    next(stream)
    cast(Any, stream).close()
    after = tokens.count
    assert after < before + 400
    time.sleep(0.1)
    assert tokens.count == after


def test_a_call_that_waits_for_its_turn_can_be_cancelled() -> None:
    slow, waiting = Tokens(pause=0.02), Tokens()
    model = chat(concurrency=1)

    async def run() -> None:
        options: dict[str, Any] = {"min_new_tokens": 30, "max_tokens": 30}
        first = asyncio.create_task(model.ainvoke("Who?", logits_processor=[slow], **options))
        while not slow.first.is_set():
            await asyncio.sleep(0.001)
        second = asyncio.create_task(model.ainvoke("Who?", logits_processor=[waiting], **options))
        await asyncio.sleep(0.01)
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        await first

    asyncio.run(run())
    assert (slow.count, waiting.count) == (30, 0)


@pytest.mark.parametrize(("model", "way"), WAYS)
def test_an_error_in_the_worker_comes_in_less_than_a_second(
    model: Callable[[], Model], way: Callable[..., Any]
) -> None:
    made, drawn = model(), answered(0)
    asyncio.run(way(made, drawn))
    failing = Tokens(fails=True)
    started = time.process_time()
    with pytest.raises(RuntimeError, match="fell off the bus"):
        asyncio.run(way(made, drawn, logits_processor=[failing]))
    assert time.process_time() - started < 1
    assert asyncio.run(way(made, drawn)) == drawn.answer, "it must serve on after an error"


def test_bad_input_comes_out_of_async_calls_as_it_does_of_others() -> None:
    with pytest.raises(RequestError, match="list of documents"):
        asyncio.run(chat().ainvoke("Who?", documents="one string"))


@pytest.mark.parametrize(("model", "way"), WAYS)
def test_a_timeout_is_an_error_not_half_an_answer(
    model: Callable[..., Model], way: Callable[..., Any]
) -> None:
    options: dict[str, Any] = {
        "min_new_tokens": 400,
        "max_tokens": 400,
        "logits_processor": [Tokens(pause=0.01)],
    }
    with pytest.raises(RequestTimeoutError, match=r"not complete after 0\.2 seconds"):
        asyncio.run(way(model(timeout=0.2), answered(0), **options))
    with pytest.raises(RequestTimeoutError):
        model().invoke("Who?", timeout=0.1, **{**options, "logits_processor": [Tokens(0.01)]})


def test_many_concurrent_calls_with_different_documents_all_answer_right() -> None:
    model = chat()
    drawn = [answered(place % N) for place in range(32)]

    async def all_at_once() -> list[str]:
        return await asyncio.gather(*[asked(model, one) for one in drawn])

    assert asyncio.run(all_at_once()) == [one.answer for one in drawn]


def test_batches_answer_right() -> None:
    places = range(0, N, 3)
    model = chat()

    def messages(drawn: Drawn) -> list[Any]:
        blocks = [
            {"type": "text-plain", "text": t, "mime_type": "text/plain"}
            for t in texts_of(drawn.documents)
        ]
        return [("human", [*blocks, {"type": "text", "text": drawn.question}])]

    answers = model.batch([messages(answered(place)) for place in places])
    assert [answer.text for answer in answers] == [answered(place).answer for place in places]
    answers = asyncio.run(model.abatch([messages(answered(place)) for place in places]))
    assert [answer.text for answer in answers] == [answered(place).answer for place in places]
