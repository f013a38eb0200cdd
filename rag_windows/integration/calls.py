"""Calls of a model from threads and event loops, answered together, ended when nobody waits."""

from __future__ import annotations

import asyncio
import queue
import time
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from rag_windows.batching.questions import OnChunk, Question, received
from rag_windows.errors import (
    CancelledGenerationError,
    GenerationTimeoutError,
    without_stop_iteration,
)
from rag_windows.model import WindowedLM
from rag_windows.request import BatchRequest, PassageLike, Request
from rag_windows.results import Chunk, Generation

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call of a model, ready to run; adapters derive theirs from it.

    Attributes:
        lm: the model.
        query: the question or conversation.
        passages: each read in a window of its own.
        options: the further arguments of `WindowedLM.generate`.
    """

    lm: WindowedLM
    query: Any
    passages: Sequence[PassageLike] = ()
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def asked(self) -> BatchRequest:
        """The arguments of `WindowedLM.generate`."""
        return BatchRequest.of({"query": self.query, "passages": self.passages, **self.options})

    def prompt_tokens(self) -> int:
        """Tokens of prefix, passages and query; nothing is encoded.

        Raises:
            InputError, PromptError, LimitError: as `WindowedLM.generate` raises them.
        """
        return Request.of(self.lm.engine, self.asked).prompt_tokens


C = TypeVar("C", bound=Call)

Prepare = Callable[[], C]
Read = Callable[[C, Generation], T]
ReadChunk = Callable[[C, Chunk], Iterable[T]]


_TICK_S = 0.02
"""An event loop may wake up so much before the time that was asked for."""


class _Waiting:
    """Somebody who waits for one answer, until it is there, is late, or nobody waits any more."""

    def __init__(self, timeout: float | None) -> None:
        self._timeout = timeout
        self._deadline = None if timeout is None else time.monotonic() + timeout
        self.left = False
        self.scheduled: Question | None = None

    def leave(self) -> None:
        """Stop the work within a token, from any thread."""
        self.left = True
        if self.scheduled is not None:
            self.scheduled.cancel()

    @contextmanager
    def in_time(self) -> Generator[float | None, None, None]:
        """Gives the seconds that are left; a wait of so many that ends is an error of ours."""
        try:
            yield None if self._deadline is None else max(0.0, self._deadline - time.monotonic())
        except (TimeoutError, queue.Empty) as error:
            if self._deadline is None or time.monotonic() < self._deadline - _TICK_S:
                raise
            raise GenerationTimeoutError(
                f"The answer was not complete after {self._timeout} seconds. Allow more with "
                "timeout=, ask for fewer new tokens, or give fewer passages."
            ) from error


class Calls:
    """The calls of one model that are under way, from threads and from event loops.

    Calls that are made at the same time share forward passes; a single one is answered as
    `WindowedLM.generate` answers it. Each method takes ``prepare``, which makes a `Call` (and may
    load the model for it), and ``read``, which makes the adapter's own answer out of what comes;
    in the asynchronous ones both run in threads. Whoever stops waiting, by cancelling a task or
    closing a stream, stops the work within a token. Copies, and what comes out of a pickle, have no
    calls under way.

    Args:
        max_rows: so many calls are answered together; 1 answers each by itself.
        max_bytes: memory that they may take together, see `WindowedLM.scheduler`.

    Raises:
        GenerationTimeoutError: from each method, where the answer took longer than ``timeout``
            seconds; they run from the call on, waiting for others included.
        CancelledGenerationError: likewise, where the process ends.
    """

    def __init__(self, max_rows: int = 32, max_bytes: int | str | None = None) -> None:
        self.max_rows, self.max_bytes = max_rows, max_bytes
        self._waiting: set[_Waiting] = set()

    def __reduce__(self) -> tuple[type[Calls], tuple[int, int | str | None]]:
        return Calls, (self.max_rows, self.max_bytes)

    @contextmanager
    def _wait(self, timeout: float | None) -> Generator[_Waiting, None, None]:
        """Count a call as under way, so that `idle` is false for the first of many."""
        waiting = _Waiting(timeout)
        self._waiting.add(waiting)
        try:
            yield waiting
        finally:
            waiting.leave()
            self._waiting.discard(waiting)

    def idle(self) -> bool:
        """Whether no more than one call is under way."""
        return len(self._waiting) <= 1

    def _begin(self, waiting: _Waiting, call: Call, on_chunk: OnChunk | None = None) -> Question:
        scheduler = call.lm.shared_scheduler(max_rows=self.max_rows, max_bytes=self.max_bytes)
        engine = call.lm.engine
        scheduled = scheduler.submit(call.asked, on_chunk=on_chunk, idle=self.idle, engine=engine)
        waiting.scheduled = scheduled
        if waiting.left:  # while the call was prepared
            scheduled.cancel()
        return scheduled

    async def _begin_async(
        self, waiting: _Waiting, prepare: Prepare[C], on_chunk: OnChunk | None = None
    ) -> tuple[C, Question]:
        await asyncio.sleep(0)  # tasks that were started with this one enter meanwhile

        def begin() -> tuple[C, Question]:
            call = prepare()
            return call, self._begin(waiting, call, on_chunk)

        return await _in_thread(begin)

    def answer(self, prepare: Prepare[C], read: Read[C, T], *, timeout: float | None = None) -> T:
        """Answer one call."""
        return self.answer_all([prepare], read, timeout=timeout)[0]

    def answer_all(
        self, prepares: Sequence[Prepare[C]], read: Read[C, T], *, timeout: float | None = None
    ) -> list[T]:
        """Answer several calls, together."""
        with ExitStack() as stack:
            waiting = [stack.enter_context(self._wait(timeout)) for _ in prepares]
            calls = [prepare() for prepare in prepares]
            asked = list(map(self._begin, waiting, calls))
            answers = []
            for one, call, scheduled in zip(waiting, calls, asked, strict=True):
                with one.in_time() as seconds:
                    generation = scheduled.result(seconds)
                answers.append(read(call, _whole(generation)))
            return answers

    def stream(
        self, prepare: Prepare[C], read: ReadChunk[C, T], *, timeout: float | None = None
    ) -> Generator[T, None, None]:
        """Answer one call piece by piece; it is prepared before a piece is asked for."""
        call = prepare()

        def read_pieces() -> Generator[T, None, None]:
            chunks: queue.SimpleQueue[Chunk | None] = queue.SimpleQueue()
            with self._wait(timeout) as waiting:

                def get() -> Chunk | None:
                    with waiting.in_time() as seconds:
                        return chunks.get(timeout=seconds)

                scheduled = self._begin(waiting, call, chunks.put)
                for chunk in received(scheduled, get):
                    if piece := _unfinished(chunk):
                        yield from read(call, piece)
                yield from read(call, Chunk("", _whole(scheduled.result())))

        return read_pieces()

    async def answer_async(
        self, prepare: Prepare[C], read: Read[C, T], *, timeout: float | None = None
    ) -> T:
        """`answer` beside an event loop."""
        with self._wait(timeout) as waiting:
            call, scheduled = await self._begin_async(waiting, prepare)
            with waiting.in_time() as seconds:
                generation = await asyncio.wait_for(asyncio.wrap_future(scheduled), seconds)
            return await _in_thread(lambda: read(call, _whole(generation)))

    async def stream_async(
        self,
        prepare: Prepare[C],
        read: ReadChunk[C, T],
        *,
        timeout: float | None = None,
        begun: Iterable[T] = (),
    ) -> AsyncGenerator[T, None]:
        """`stream` beside an event loop, in which ``read`` runs, but for the last piece.

        ``begun`` comes first, as soon as the call was checked and waits for its answer.
        """
        loop = asyncio.get_running_loop()
        chunks: asyncio.Queue[Chunk | None] = asyncio.Queue()
        with self._wait(timeout) as waiting:

            def put(chunk: Chunk | None) -> None:
                try:
                    loop.call_soon_threadsafe(chunks.put_nowait, chunk)
                except RuntimeError:  # the loop was closed: nobody waits
                    waiting.leave()

            call, scheduled = await self._begin_async(waiting, prepare, put)
            for made in begun:
                yield made
            while True:
                with waiting.in_time() as seconds:
                    chunk = await asyncio.wait_for(chunks.get(), seconds)
                if chunk is None:
                    break
                if piece := _unfinished(chunk):
                    for made in read(call, piece):
                        yield made
            last = Chunk("", _whole(scheduled.result()))
            for made in await _in_thread(lambda: list(read(call, last))):
                yield made


def _unfinished(chunk: Chunk) -> Chunk | None:
    """What a chunk has of the text and the reasoning; adapters read the whole answer by itself."""
    return replace(chunk, generation=None) if chunk.text or chunk.reasoning else None


def _whole(generation: Generation) -> Generation:
    """A complete answer; a cancelled one is an error."""
    if generation.finish_reason == "cancelled":
        raise CancelledGenerationError("The generation was cancelled.")
    return generation


async def _in_thread(work: Callable[[], T]) -> T:
    def run() -> T:
        try:
            return work()
        except (StopIteration, StopAsyncIteration) as error:
            # No future can carry one.
            raise without_stop_iteration(error) from error

    return await asyncio.to_thread(run)
