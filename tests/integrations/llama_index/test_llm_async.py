"""The event loop keeps ticking, and work ends with whoever waits for it."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import suppress
from typing import Any

import pytest
from llama_index.core.prompts import PromptTemplate

from llama_index.llms.rag_windows import Parts, RagWindowsLLM
from rag_windows import GenerationError
from tests.integrations.llama_index.cases import N, draw, llm, one_for_each_place, reader
from tests.integrations.llama_index.endpoints import ASYNC, ENDPOINTS, user
from tests.integrations.llama_index.slow import Pace

TEMPLATE = PromptTemplate("{context_str}\n{query_str}")
TOKENS = 24


def slow(pace: Pace, tokens: int = TOKENS, **options: Any) -> RagWindowsLLM:
    return RagWindowsLLM(
        lm=reader(),
        max_new_tokens=tokens,
        generate_kwargs={"logits_processor": [pace]},
        **options,
    )


async def predicted(model: RagWindowsLLM, question: str, **options: Any) -> str:
    return await model.apredict(
        TEMPLATE, context_str=Parts.of(options["passages"]), query_str=question
    )


async def streamed(model: RagWindowsLLM, question: str, **options: Any) -> list[str]:
    stream = await model.astream(
        TEMPLATE, context_str=Parts.of(options["passages"]), query_str=question
    )
    return [piece async for piece in stream]


CALLS: dict[str, Callable[..., Awaitable[Any]]] = {
    **ASYNC,
    "apredict": predicted,
    "astream": streamed,
}


async def longest_gap(work: Awaitable[Any]) -> float:
    """Seconds between two ticks of the loop while ``work`` runs, the longest time."""
    gaps = [0.0]
    task = asyncio.ensure_future(work)
    before = time.perf_counter()
    while not task.done():
        await asyncio.sleep(0.002)
        now = time.perf_counter()
        gaps.append(now - before)
        before = now
    await task
    return max(gaps)


@pytest.mark.parametrize("name", CALLS)
def test_the_event_loop_keeps_ticking(name: str) -> None:
    asked = draw(1, 3)
    over = []
    for _ in range(4):  # another process may take the machine for a moment, not four times
        pace = Pace(0.015)
        work = CALLS[name](slow(pace), asked.question, passages=asked.passages)
        gap = asyncio.run(longest_gap(work))
        over.append(gap - (0.050 + pace.slowest))
        assert pace.tokens == TOKENS
        if over[-1] <= 0:
            break
    assert min(over) <= 0


def test_a_blocking_call_would_be_seen() -> None:
    async def blocking() -> None:
        slow(pace).complete("Where?")

    pace = Pace(0.015)
    assert asyncio.run(longest_gap(blocking())) > 0.050 + pace.slowest


def running() -> int:
    """Threads in which a stream is being made."""
    return sum(thread.name == "rag-windows-stream" for thread in threading.enumerate())


async def settle(pace: Pace) -> int:
    """Tokens made after now, once nothing moves any more."""
    before = pace.tokens
    await asyncio.sleep(0.3)
    return pace.tokens - before


@pytest.mark.parametrize("name", CALLS)
def test_cancelling_a_task_stops_generation_within_a_token(name: str) -> None:
    asked = draw(2, 0, 2)

    async def cancel() -> int:
        pace = Pace(0.03)
        work = CALLS[name](slow(pace, 400), asked.question, passages=asked.passages)
        task = asyncio.ensure_future(work)
        await asyncio.to_thread(pace.started.wait)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        assert task.cancelled()
        return await settle(pace)

    assert asyncio.run(cancel()) <= 1


@pytest.mark.parametrize("name", ["astream_chat", "astream_complete"])
@pytest.mark.parametrize("close", [True, False])
def test_an_async_stream_that_is_left_stops(name: str, close: bool) -> None:
    """Closed, or left by break: then the loop closes it when nothing refers to it."""

    async def leave() -> int:
        pace = Pace(0.03)
        model = slow(pace, 400)
        question = user("Where?") if "chat" in name else "Where?"
        stream: AsyncGenerator[Any, None] = await getattr(model, name)(question)
        async for _ in stream:
            break
        if close:
            await stream.aclose()
        else:
            del stream
            gc.collect()
            await asyncio.sleep(0.01)
        return await settle(pace)

    assert asyncio.run(leave()) <= 1


@pytest.mark.parametrize("name", ["stream_chat", "stream_complete"])
def test_closing_a_stream_stops_it(name: str) -> None:
    pace = Pace(0.02)
    stream = getattr(slow(pace, 400), name)(user("Where?") if "chat" in name else "Where?")
    next(stream)
    stream.close()
    tokens = pace.tokens
    assert running() == 0
    time.sleep(0.1)
    assert pace.tokens == tokens <= 4


@pytest.mark.parametrize("name", ENDPOINTS)
def test_an_error_of_the_worker_surfaces_at_once(name: str) -> None:
    pace = Pace(0.0, fails_at=3)
    with pytest.raises(RuntimeError, match="the worker broke"):
        ENDPOINTS[name](slow(pace), "Where?")
    assert time.perf_counter() - pace.last < 1.0
    assert pace.tokens == 3


@pytest.mark.parametrize("name", ENDPOINTS)
def test_what_synthesizers_swallow_comes_as_another_error(name: str) -> None:
    pace = Pace(0.0, fails_at=2, error=ValueError("not that one"))
    with pytest.raises(GenerationError, match="not that one"):
        ENDPOINTS[name](slow(pace), "Where?")


def test_serving_pressure() -> None:
    """32 calls at once, each over documents of its own."""
    cases = [*one_for_each_place(), *one_for_each_place()]
    assert len(cases) == 2 * N

    async def serve() -> list[Any]:
        return await asyncio.gather(
            *(llm().achat(user(asked.question), nodes=asked.nodes) for asked in cases)
        )

    responses = asyncio.run(serve())
    assert [r.message.content for r in responses] == [asked.answer for asked in cases]
    for response, asked in zip(responses, cases, strict=True):
        assert [one["id"] for one in response.raw["citations"]] == [n.node_id for n in asked.nodes]


@pytest.mark.parametrize("rows", [1, 4])
def test_waiting_calls_that_are_cancelled_do_no_work(rows: int) -> None:
    async def crowd() -> int:
        pace = Pace(0.02)
        model = slow(pace, 20, batch_rows=rows)
        tasks = [asyncio.ensure_future(model.acomplete("Where?")) for _ in range(24)]
        await asyncio.to_thread(pace.started.wait)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return await settle(pace)

    assert asyncio.run(crowd()) <= 4
