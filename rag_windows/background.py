"""Generations beside an event loop: in threads that stop when nobody waits for them."""

from __future__ import annotations

import asyncio
import contextvars
import threading
import time
from collections.abc import AsyncGenerator, Callable, Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any, TypeVar

import torch
from transformers import StoppingCriteria

from rag_windows.encoding import OnEncoded
from rag_windows.errors import (
    GenerationError,
    GenerationTimeoutError,
    StopIterationTold,
    without_stop_iteration,
)

T = TypeVar("T")


class CancelledGenerationError(GenerationError):
    """Nobody waits for this generation any more."""


class Watch(StoppingCriteria):
    """Ends one generation early: when it is cancelled, or after a time.

    Hand ``options(...)`` to `WindowedLM.generate` or ``stream``, and call `check` on what they
    gave: a text that was cut off by time is an error, not an answer.

    Args:
        timeout: seconds from now, or None.
    """

    def __init__(self, timeout: float | None = None) -> None:
        self._timeout = timeout
        self._deadline = None if timeout is None else time.monotonic() + timeout
        self._cancelled = threading.Event()
        self._stopped = False
        self._stops: list[Callable[[], object]] = []

    def cancel(self) -> None:
        """Stop at the next token, or at the next batch of windows."""
        self._cancelled.set()
        for stop in [*self._stops]:
            stop()

    def stops(self, stop: Callable[[], object]) -> None:
        """Have `cancel` call this as well; at once if it was cancelled already.

        Args:
            stop: may be called twice, from any thread.
        """
        self._stops.append(stop)
        if self._cancelled.is_set():
            stop()

    def options(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """The options of a generation with this watch among them."""
        told: OnEncoded | None = options.get("on_encoded")

        def on_encoded(done: int, total: int) -> None:
            self._stopped = self._over()
            self.check()
            if told is not None:
                told(done, total)

        criteria = [*(options.get("stopping_criteria") or []), self]
        return {**options, "on_encoded": on_encoded, "stopping_criteria": criteria}

    def check(self) -> None:
        """Raise if the generation was stopped by this watch.

        Raises:
            GenerationTimeoutError: it took too long.
            CancelledGenerationError: it was cancelled.
        """
        if not self._stopped:
            return
        if self._cancelled.is_set():
            raise CancelledGenerationError("The generation was cancelled.")
        raise GenerationTimeoutError(
            f"The answer was not complete after {self._timeout} seconds. Allow more with timeout=, "
            "ask for fewer new tokens, or give fewer passages."
        )

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """Bool, (rows,)."""
        self._stopped = self._stopped or self._over()
        return torch.full((input_ids.shape[0],), self._stopped, device=input_ids.device)

    def _over(self) -> bool:
        late = self._deadline is not None and time.monotonic() > self._deadline
        return late or self._cancelled.is_set()


async def in_thread(
    pool: ThreadPoolExecutor,
    context: contextvars.Context,
    work: Callable[..., T],
    *arguments: Any,
) -> T:
    """Wait for work in a thread; a StopIteration in it is told, since no future can carry one.

    Args:
        pool: whose threads do it.
        context: variables in which it runs.
        work: called with ``arguments``.
        arguments: of ``work``.
    """
    told = StopIterationTold()(work)
    return await asyncio.get_running_loop().run_in_executor(pool, context.run, told, *arguments)


async def run(pool: ThreadPoolExecutor, work: Callable[[], T], watch: Watch) -> T:
    """Wait for work in a thread; cancelling the wait cancels the watch.

    Args:
        pool: whose threads do it. With fewer threads than callers, the callers wait in turn.
        work: calls the engine with ``watch.options(...)``.
        watch: of this work.
    """
    context = contextvars.copy_context()
    try:
        return await in_thread(pool, context, work)
    finally:
        watch.cancel()


async def iterate(
    pool: ThreadPoolExecutor, work: Callable[[], Generator[T, None, None]], watch: Watch
) -> AsyncGenerator[T, None]:
    """Yield what an iterator gives that is made and read in a thread.

    Closing this generator, or cancelling who waits for it, cancels the watch; what the thread
    raises is raised here.

    Args:
        pool: see `run`.
        work: makes the iterator, with ``watch.options(...)``; its ``close`` is called.
        watch: of this work.
    """
    loop = asyncio.get_running_loop()
    items: asyncio.Queue[tuple[T] | BaseException | None] = asyncio.Queue()

    def put(item: tuple[T] | BaseException | None) -> None:
        try:
            loop.call_soon_threadsafe(items.put_nowait, item)
        except RuntimeError:  # the loop was closed: nobody waits
            watch.cancel()

    def read() -> None:
        try:
            with closing(work()) as iterator:
                for item in iterator:
                    put((item,))
        except BaseException as error:  # noqa: BLE001 - handed to the consumer, whatever it is
            put(without_stop_iteration(error))
        else:
            put(None)

    context = contextvars.copy_context()
    future = loop.run_in_executor(pool, context.run, read)
    try:
        while (item := await items.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item[0]
    finally:
        watch.cancel()
        future.cancel()
