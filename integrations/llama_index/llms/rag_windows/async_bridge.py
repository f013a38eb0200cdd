"""The engine beside LlamaIndex's event loop."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from typing import cast
from weakref import WeakKeyDictionary

from llama_index.llms.rag_windows.questions import Question, surfacing
from llama_index.llms.rag_windows.source import ModelSource
from rag_windows import Chunk, Generation, WindowedLM
from rag_windows.batching.awaiting import answered, followed, submitted
from rag_windows.batching.questions import OnText
from rag_windows.batching.scheduler import Scheduled
from rag_windows.forks import Lock
from rag_windows.streaming import Watch, iterate, run

WORKERS = 4
"""Threads that tokenize the asynchronous calls of one model, or, where they are answered one by
one, answer them. More would only wait for each other, and for the interpreter, which they share
with the event loop."""

_pools: WeakKeyDictionary[WindowedLM, ThreadPoolExecutor] = WeakKeyDictionary()
_lock = Lock()
if hasattr(os, "register_at_fork"):  # a child has none of the threads; Windows has no forks
    os.register_at_fork(after_in_child=_pools.clear)


async def generate(source: ModelSource, question: Question, rows: int) -> Generation:
    """The answer, awaited; cancelling the task stops it within a token.

    Args:
        source: of the model.
        question: what is asked.
        rows: so many calls are answered together; 1 for each by itself.
    """
    watch = Watch()
    options = watch.options(question.options)
    with source.crowd.entered():
        lm = await _load(source)

        def by_itself() -> Generation:
            return lm.generate(question.query, question.passages, **options)

        def asked() -> tuple[Scheduled, Callable[[Generation], Generation]]:
            request = question.request(options)
            ticket = submitted(lm, request, watch, max_rows=rows, crowd=source.crowd)
            return ticket, lambda generation: generation

        with surfacing():
            if rows == 1:
                return await run(_workers(lm), by_itself, watch)
            return await answered(_workers(lm), asked, watch)


async def stream(source: ModelSource, question: Question, rows: int) -> AsyncGenerator[Chunk, None]:
    """The answer for ``async for``; closing it stops the work within a token.

    Args:
        source: of the model.
        question: what is asked.
        rows: see `generate`.
    """
    watch = Watch()
    options = watch.options(question.options)
    with source.crowd.entered():
        lm = await _load(source)

        def by_itself() -> Generator[Chunk, None, None]:
            chunks = lm.stream(question.query, question.passages, **options)
            return cast("Generator[Chunk, None, None]", chunks)

        def asked(on_text: OnText) -> tuple[Scheduled, Callable[[Chunk], tuple[Chunk]]]:
            request = question.request(options)
            ticket = submitted(
                lm, request, watch, max_rows=rows, crowd=source.crowd, on_text=on_text
            )
            return ticket, lambda chunk: (chunk,)

        pool = _workers(lm)
        pieces = followed(pool, asked, watch) if rows > 1 else iterate(pool, by_itself, watch)
        async with aclosing(pieces):
            with surfacing():
                async for chunk in pieces:
                    yield chunk


async def _load(source: ModelSource) -> WindowedLM:
    """The model; loading it blocks a thread, not the event loop."""
    return source.lm() if source.loaded else await asyncio.to_thread(source.lm)


def _workers(lm: WindowedLM) -> ThreadPoolExecutor:
    # The same for every LLM object of a model; the threads end when the model is gone.
    with _lock:
        pool = _pools.get(lm)
        if pool is None:
            pool = _pools[lm] = ThreadPoolExecutor(WORKERS, thread_name_prefix="rag-windows")
        return pool
