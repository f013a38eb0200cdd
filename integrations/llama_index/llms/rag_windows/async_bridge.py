"""The engine beside LlamaIndex's event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from typing import Any, cast
from weakref import WeakKeyDictionary

from llama_index.llms.rag_windows.questions import Question, surfacing
from llama_index.llms.rag_windows.source import ModelSource
from rag_windows import Chunk, Generation, WindowedLM
from rag_windows.background import Watch, iterate, run

WORKERS = 4
"""Asynchronous calls that one model answers at once; more wait in line. More threads would only
wait for each other, and for the interpreter, which they share with the event loop."""

_pools: WeakKeyDictionary[WindowedLM, ThreadPoolExecutor] = WeakKeyDictionary()
_lock = threading.Lock()


async def load(source: ModelSource) -> WindowedLM:
    """The model; loading it blocks a thread, not the event loop."""
    return source.lm() if source.loaded else await asyncio.to_thread(source.lm)


async def generate(lm: WindowedLM, question: Question) -> Generation:
    """`WindowedLM.generate`, awaited; cancelling the task stops it within a token."""
    watch = Watch()
    options = watch.options(question.options)

    def work() -> Generation:
        return lm.generate(question.messages, question.passages, **options)

    with surfacing():
        return await run(_workers(lm), work, watch)


async def stream(lm: WindowedLM, question: Question) -> AsyncGenerator[Chunk, None]:
    """`WindowedLM.stream`, for ``async for``; closing it stops the work within a token."""
    watch = Watch()
    options = watch.options(question.options)

    def work() -> Generator[Chunk, None, None]:
        chunks = lm.stream(question.messages, question.passages, **options)
        return cast("Generator[Chunk, None, None]", chunks)

    pieces: Any = iterate(_workers(lm), work, watch)
    async with aclosing(pieces):
        with surfacing():
            async for chunk in pieces:
                yield chunk


def _workers(lm: WindowedLM) -> ThreadPoolExecutor:
    # The same for every LLM object of a model; the threads end when the model is gone.
    with _lock:
        pool = _pools.get(lm)
        if pool is None:
            pool = _pools[lm] = ThreadPoolExecutor(WORKERS, thread_name_prefix="rag-windows")
        return pool
