"""Text as it comes, and work in threads of its own."""

from __future__ import annotations

import asyncio
import atexit
import contextvars
import queue
import threading
import time
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any, TypeVar
from weakref import WeakSet

import torch
from transformers import StoppingCriteria
from transformers.generation.streamers import BaseStreamer

from rag_windows.errors import (
    GenerationError,
    GenerationTimeoutError,
    StopIterationTold,
    without_stop_iteration,
)
from rag_windows.prefill import OnEncoded
from rag_windows.prompt.detokenize import Detokenizer
from rag_windows.results import Chunk, Generation

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


Work = Callable[[BaseStreamer | None, threading.Event], Generation]
"""Generates, feeding a streamer, until done or the event is set."""

PATIENCE = 30.0
"""Seconds that a process which ends waits for each worker, once it was told to stop."""


class Worker(threading.Thread):
    """A thread that generates; a process that ends stops it first.

    A thread cut off inside of a tensor operation aborts Python.

    Args:
        work: what it does.
        name: of the thread.
        stop: makes it end soon; called from any thread.
    """

    def __init__(self, work: Callable[[], None], name: str, stop: Callable[[], object]) -> None:
        super().__init__(target=work, name=name, daemon=True)
        self.stop = stop

    def start(self) -> None:
        """Start; RuntimeError if the system gives no more threads."""
        super().start()
        _workers.add(self)


_workers: WeakSet[Worker] = WeakSet()


@atexit.register
def _stop_workers() -> None:
    workers = [*_workers]
    for worker in workers:
        worker.stop()
    for worker in workers:
        worker.join(PATIENCE)


class Pieces(BaseStreamer):
    """Turns tokens into pieces of settled text.

    Attributes:
        sent: the text put so far.

    Args:
        detokenizer: of the model.
        stop: strings before which the text ends.
        put: takes each piece.
    """

    def __init__(
        self, detokenizer: Detokenizer, stop: Sequence[str], put: Callable[[str], None]
    ) -> None:
        self._detokenizer = detokenizer
        self._stop = tuple(stop)
        self._put = put
        self._ids: list[int] = []
        self._prompt_passed = False
        self.sent = ""

    def put(self, value: torch.Tensor) -> None:
        """Take the prompt (ignored), then each new token."""
        if not self._prompt_passed:
            self._prompt_passed = True
            return
        self._ids.extend(int(token) for token in value.flatten().tolist())
        settled = self._detokenizer.settled(self._ids, self._stop)
        if len(settled) > len(self.sent) and settled.startswith(self.sent):
            self._put(settled[len(self.sent) :])
            self.sent = settled

    def end(self) -> None:
        """Nothing: the rest comes with the whole result."""


def stream(
    work: Work, detokenizer: Detokenizer, stop: Sequence[str], by_token: bool
) -> Iterator[Chunk]:
    """Run ``work`` in a thread and yield its text as it settles.

    Closing the iterator sets the event, waits for the worker and returns; an exception in the
    worker is raised here.

    Args:
        work: the generation.
        detokenizer: of the model.
        stop: strings before which the text ends.
        by_token: False where tokens are not final as they come (beams): then one chunk comes.
    """
    pieces: queue.SimpleQueue[str | Generation | BaseException] = queue.SimpleQueue()
    cancelled = threading.Event()
    streamer = Pieces(detokenizer, stop, pieces.put) if by_token else None

    def run() -> None:
        try:
            pieces.put(work(streamer, cancelled))
        except BaseException as error:  # noqa: BLE001 - handed to the consumer, whatever it is
            pieces.put(without_stop_iteration(error))

    context = contextvars.copy_context()
    worker = Worker(lambda: context.run(run), "rag-windows-stream", cancelled.set)
    worker.start()
    try:
        yield from _chunks(pieces)
    finally:
        cancelled.set()
        worker.join()


def _chunks(pieces: queue.SimpleQueue[Any]) -> Iterator[Chunk]:
    sent = ""
    while True:
        piece = pieces.get()
        if isinstance(piece, BaseException):
            raise piece
        if isinstance(piece, Generation):
            if not piece.text.startswith(sent):
                raise GenerationError(
                    "The tokenizer rewrote text that was already streamed; use generate() with "
                    "this tokenizer."
                )
            yield Chunk(piece.text[len(sent) :], piece)
            return
        sent += piece
        yield Chunk(piece)
