"""Work beside an event loop: it stops when nobody waits for it."""

from __future__ import annotations

import asyncio
import contextvars
import threading
import time
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing

import pytest

from rag_windows.errors import GenerationTimeoutError
from rag_windows.streaming import CancelledGenerationError, Watch, iterate, run
from tests.rag_windows import small

LONG = {"min_new_tokens": 200, "max_new_tokens": 200}


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as made:
        yield made


def test_an_unused_watch_changes_nothing() -> None:
    watch = Watch()
    plain = small.lm().generate("What?", ["a", "b c"], max_new_tokens=6)
    watched = small.lm().generate("What?", ["a", "b c"], **watch.options({"max_new_tokens": 6}))
    watch.check()
    assert watched.token_ids == plain.token_ids


@pytest.mark.parametrize("passages", [["a"], []])
def test_time_that_runs_out_is_an_error(passages: list[str]) -> None:
    watch = Watch(0.05)

    def ask() -> None:
        small.lm().generate("What?", passages, **watch.options(dict(LONG)))
        watch.check()

    with pytest.raises(GenerationTimeoutError, match=r"after 0\.05 seconds"):
        ask()


def test_encoding_is_stopped_between_passes() -> None:
    watch, told = Watch(), []
    lm = small.lm().__class__(small.model(), small.tokenizer(), max_batch_tokens=8)

    def on_encoded(done: int, total: int) -> None:
        told.append((done, total))
        watch.cancel()

    with pytest.raises(CancelledGenerationError):
        lm.generate("What?", ["one", "two", "three"], **watch.options({"on_encoded": on_encoded}))
    assert told == [(1, 3)]


def test_a_result_or_an_error_comes_to_who_waits(pool: ThreadPoolExecutor) -> None:
    variable = contextvars.ContextVar("variable", default="unset")
    variable.set("set")

    def fail() -> None:
        raise LookupError("lost")

    assert asyncio.run(run(pool, variable.get, Watch())) == "set"
    with pytest.raises(LookupError, match="lost"):
        asyncio.run(run(pool, fail, Watch()))


def test_a_cancelled_wait_cancels_the_watch(pool: ThreadPoolExecutor) -> None:
    watch, started = Watch(), threading.Event()

    def work() -> str:
        started.set()
        small.lm().generate("What?", ["a"], **watch.options(dict(LONG)))
        watch.check()
        return "finished"

    async def cancel() -> None:
        task = asyncio.create_task(run(pool, work, watch))
        await asyncio.to_thread(started.wait)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel())
    pool.shutdown()
    with pytest.raises(CancelledGenerationError):
        watch.check()


def test_pieces_come_in_order_and_then_the_error(pool: ThreadPoolExecutor) -> None:
    def work() -> Generator[int, None, None]:
        yield from range(5)
        raise LookupError("lost")

    got: list[int] = []

    async def read() -> None:
        async for piece in iterate(pool, work, Watch()):
            got.append(piece)

    with pytest.raises(LookupError, match="lost"):
        asyncio.run(read())
    assert got == [0, 1, 2, 3, 4]


def test_leaving_a_stream_cancels_and_closes_it(pool: ThreadPoolExecutor) -> None:
    watch, closed = Watch(), threading.Event()

    def work() -> Generator[str, None, None]:
        try:
            for chunk in small.lm().stream("What?", ["a"], **watch.options(dict(LONG))):
                watch.check()
                yield chunk.text
        finally:
            closed.set()

    async def leave() -> None:
        async with aclosing(iterate(pool, work, watch)) as pieces:
            async for _ in pieces:
                break

    asyncio.run(leave())
    assert closed.wait(5)


def test_a_loop_that_was_closed_ends_the_work(pool: ThreadPoolExecutor) -> None:
    go, over = threading.Event(), threading.Event()
    watch = Watch()

    def work() -> Generator[int, None, None]:
        yield 0
        go.wait(5)
        yield 1
        over.set()

    async def first() -> int:
        pieces = iterate(pool, work, watch)
        number = await anext(pieces)
        abandoned.append(pieces)
        return number

    abandoned: list[object] = []
    assert asyncio.run(first()) == 0
    go.set()
    assert over.wait(5)
    time.sleep(0.01)
