"""Calls of a model from threads and event loops, answered together, ended when nobody waits."""

from __future__ import annotations

import asyncio
import contextvars
import threading
import time
from collections.abc import (
    AsyncGenerator,
    Callable,
    Generator,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from transformers import StoppingCriteria

from rag_windows.batching.scheduler import Scheduled
from rag_windows.errors import (
    CancelledGenerationError,
    GenerationTimeoutError,
    stop_iteration_told,
    without_stop_iteration,
)
from rag_windows.model import WindowedLM
from rag_windows.prefill import OnEncoded
from rag_windows.request import PassageLike
from rag_windows.results import Chunk, Generation
from rag_windows.threads import in_children

T = TypeVar("T")


class Watch(StoppingCriteria):
    """Ends one generation early: when it is cancelled, or so many seconds from now.

    Hand ``options(...)`` to `WindowedLM.generate` or ``stream``, and call `check` on what they
    gave: a text that was cut off by time is an error, not an answer.
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
        """Have `cancel` call this as well, from any thread; at once if it was called already."""
        self._stops.append(stop)
        if self._cancelled.is_set():
            stop()

    def options(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """The options of a generation with this watch among them."""
        also: OnEncoded | None = options.get("on_encoded")

        def on_encoded(done: int, total: int) -> None:
            self._stopped = self._over()
            self.check()
            if also is not None:
                also(done, total)

        criteria = [*(options.get("stopping_criteria") or []), self]
        return {**options, "on_encoded": on_encoded, "stopping_criteria": criteria}

    def check(self) -> None:
        """Raise if the generation was stopped by this watch."""
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


C = TypeVar("C", bound=Call)

Prepare = Callable[[], C]
Read = Callable[[C, Generation], T]
ReadChunk = Callable[[C, Chunk], Iterable[T]]


class Calls:
    """The calls of one model that are under way, from threads and from event loops.

    Calls that are made at the same time share forward passes; a lone one is answered as
    `WindowedLM.generate` answers it. Each method takes ``prepare``, which makes a `Call` (and may
    load the model for it), and ``read``, which makes the adapter's own answer out of what comes;
    in the asynchronous ones both run in threads. Whoever stops waiting, by cancelling a task or
    closing a stream, stops the work within a token. Copies, what comes out of a pickle, and a
    forked child's have no calls under way.

    Args:
        max_rows: so many calls are answered together; 1 answers each by itself.
        threads: for asynchronous calls. They tokenize, or with ``max_rows=1`` answer; more than a
            few would wait for each other, and for the interpreter, which the event loop needs too.

    Raises:
        GenerationTimeoutError: from each method, where the answer took longer than ``timeout``
            seconds; they run from the call on, waiting for others included.
    """

    def __init__(self, max_rows: int = 32, threads: int = 4) -> None:
        self.max_rows = max_rows
        self.threads = threads
        self.after_fork()
        in_children(self)

    def __reduce__(self) -> tuple[type[Calls], tuple[int, int]]:
        return Calls, (self.max_rows, self.threads)

    def after_fork(self) -> None:
        """The calls and the threads are the parent's."""
        self._lock = threading.Lock()
        self._count = 0
        self._executor: ThreadPoolExecutor | None = None

    @contextmanager
    def entered(self) -> Iterator[None]:
        """One call more is under way: by this count the first of many is told from a lone one."""
        with self._lock:
            self._count += 1
        try:
            yield
        finally:
            with self._lock:
                self._count -= 1

    def lone(self) -> bool:
        """Whether no more than one call is under way."""
        return self._count <= 1

    def answer(self, prepare: Prepare[C], read: Read[C, T], *, timeout: float | None = None) -> T:
        """Answer one call."""
        return self._answered(prepare, read, Watch(timeout))

    def _answered(self, prepare: Prepare[C], read: Read[C, T], watch: Watch) -> T:
        with self.entered():
            call = prepare()
            options = watch.options(call.options)
            if self.max_rows == 1:
                generation = call.lm.generate(call.query, call.passages, **options)
            else:
                asked = {"query": call.query, "passages": call.passages, **options}
                scheduler = call.lm.shared_scheduler(max_rows=self.max_rows)
                generation = scheduler.answer(asked, lone=self.lone)
            watch.check()
            return read(call, generation)

    def answer_all(
        self, prepares: Sequence[Prepare[C]], read: Read[C, T], *, timeout: float | None = None
    ) -> list[T]:
        """Answer several calls, together."""
        if len(prepares) < 2 or self.max_rows == 1:
            return [self.answer(prepare, read, timeout=timeout) for prepare in prepares]
        watches = [Watch(timeout) for _ in prepares]
        try:
            with self.entered(), self.entered():  # the first is not taken for a lone one
                calls = [prepare() for prepare in prepares]
                asked = list(map(self._submit, calls, watches))
                made = []
                for call, scheduled, watch in zip(calls, asked, watches, strict=True):
                    generation = scheduled.result()
                    watch.check()
                    made.append(read(call, generation))
                return made
        finally:
            for watch in watches:
                watch.cancel()

    def stream(
        self, prepare: Prepare[C], read: ReadChunk[C, T], *, timeout: float | None = None
    ) -> Generator[T, None, None]:
        """Answer one call by itself, piece by piece; it is checked before a piece is asked for."""
        watch = Watch(timeout)
        call = prepare()
        chunks: Any = call.lm.stream(call.query, call.passages, **watch.options(call.options))

        def pieces() -> Generator[T, None, None]:
            with closing(chunks):
                for chunk in chunks:
                    watch.check()
                    yield from read(call, chunk)

        return pieces()

    async def answer_async(
        self, prepare: Prepare[C], read: Read[C, T], *, timeout: float | None = None
    ) -> T:
        """`answer` beside an event loop."""
        watch, context = Watch(timeout), contextvars.copy_context()

        def asked() -> tuple[C, Scheduled]:
            call = prepare()
            return call, self._submit(call, watch)

        with self.entered():
            try:
                if self.max_rows == 1:
                    answered = partial(self._answered, prepare, read, watch)
                    return await self._in_thread(context, answered)
                await asyncio.sleep(0)  # tasks that were started with this one enter meanwhile
                call, scheduled = await self._in_thread(context, asked)
                generation = await asyncio.wrap_future(scheduled)
                watch.check()
                return await self._in_thread(context, lambda: read(call, generation))
            finally:
                watch.cancel()

    async def stream_async(
        self, prepare: Prepare[C], read: ReadChunk[C, T], *, timeout: float | None = None
    ) -> AsyncGenerator[T, None]:
        """`stream` beside an event loop; together with other calls, and without a thread for each.

        ``read`` runs in the event loop, but for the last piece, which carries all that is known of
        the answer.
        """
        watch, context = Watch(timeout), contextvars.copy_context()
        loop = asyncio.get_running_loop()
        pieces: asyncio.Queue[tuple[C, Chunk] | BaseException | None] = asyncio.Queue()

        def put(piece: tuple[C, Chunk] | BaseException | None) -> None:
            try:
                loop.call_soon_threadsafe(pieces.put_nowait, piece)
            except RuntimeError:  # the loop was closed: nobody waits
                watch.cancel()

        def by_itself(call: C) -> None:
            chunks: Any = call.lm.stream(call.query, call.passages, **watch.options(call.options))
            with closing(chunks):
                for chunk in chunks:
                    put((call, chunk))
            put(None)

        def submitted(call: C) -> None:
            def ended(scheduled: Future[Generation]) -> None:
                if not scheduled.cancelled():  # else nobody waits
                    put(scheduled.exception() or (call, Chunk("", scheduled.result())))

            scheduled = self._submit(call, watch, lambda text: put((call, Chunk(text))))
            scheduled.add_done_callback(ended)

        def work() -> None:
            try:
                (by_itself if self.max_rows == 1 else submitted)(prepare())
            except BaseException as error:  # noqa: BLE001 - handed to the consumer, whatever it is
                put(without_stop_iteration(error))

        with self.entered():
            await asyncio.sleep(0)  # tasks that were started with this one enter meanwhile
            future = loop.run_in_executor(self._pool(), context.run, work)
            try:
                while (piece := await pieces.get()) is not None:
                    if isinstance(piece, BaseException):
                        raise piece
                    watch.check()
                    if piece[1].generation is None:
                        for made in read(*piece):
                            yield made
                        continue
                    telling = partial(lambda *last: list(read(*last)), *piece)
                    whole = await self._in_thread(context.copy(), telling)
                    for made in whole:
                        yield made
                    return
            finally:
                watch.cancel()
                future.cancel()

    def _submit(
        self, call: Call, watch: Watch, on_text: Callable[[str], None] | None = None
    ) -> Scheduled:
        options = watch.options(call.options)
        asked = {"query": call.query, "passages": call.passages, **options}
        scheduler = call.lm.shared_scheduler(max_rows=self.max_rows)
        scheduled = scheduler.submit(asked, on_text=on_text, lone=self.lone)
        watch.stops(scheduled.cancel)
        return scheduled

    async def _in_thread(self, context: contextvars.Context, work: Callable[[], T]) -> T:
        # A StopIteration becomes another error: no future can carry one.
        safe = stop_iteration_told(work)
        return await asyncio.get_running_loop().run_in_executor(self._pool(), context.run, safe)

    def _pool(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._executor is None:
                self._executor = ThreadPoolExecutor(self.threads, thread_name_prefix="rag-windows")
            return self._executor
