"""Who asks at the same time."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from rag_windows.batching.questions import OnText
from rag_windows.batching.scheduler import Scheduled
from rag_windows.forks import in_children
from rag_windows.request import BatchRequest
from rag_windows.results import Chunk, Generation
from rag_windows.streaming import Watch, in_thread

if TYPE_CHECKING:
    from rag_windows.model import WindowedLM


class Crowd:
    """Counts the calls that are under way, from before they are read until they are answered.

    A scheduler knows a question only once it is tokenized; by this the first of many that come at
    once is told from a lone one.
    """

    def __init__(self) -> None:
        self.after_fork()
        in_children(self)

    def after_fork(self) -> None:
        """The calls are the parent's."""
        self._lock = threading.Lock()
        self._count = 0

    @contextmanager
    def entered(self) -> Iterator[None]:
        """One call more, while the block runs."""
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


T = TypeVar("T")


def submitted(
    lm: WindowedLM,
    request: Mapping[str, Any] | BatchRequest,
    watch: Watch,
    *,
    max_rows: int,
    crowd: Crowd,
    on_text: OnText | None = None,
) -> Scheduled:
    """Ask the model's shared scheduler; cancelling the watch cancels the question.

    Args:
        lm: the model.
        request: its options are those of ``watch.options(...)``.
        watch: of this question.
        max_rows: see `WindowedLM.shared_scheduler`.
        crowd: in which this call is counted.
        on_text: see `Scheduler.submit`.

    Raises:
        InputError, PromptError, LimitError: see `Scheduler.submit`.
    """
    scheduler = lm.shared_scheduler(max_rows=max_rows)
    scheduled = scheduler.submit(request, on_text=on_text, lone=crowd.lone)
    watch.stops(scheduled.cancel)
    return scheduled


async def answered(
    pool: ThreadPoolExecutor,
    ask: Callable[[], tuple[Scheduled, Callable[[Generation], T]]],
    watch: Watch,
) -> T:
    """Wait for an answer, without a thread of its own; cancelling the wait cancels the watch.

    Args:
        pool: whose threads ask, and read the answer.
        ask: gives what `submitted` gave, and what reads the answer.
        watch: of this question.
    """
    context = contextvars.copy_context()
    await asyncio.sleep(0)  # tasks that were started with this one enter the crowd meanwhile
    try:
        scheduled, read = await in_thread(pool, context, ask)
        generation = await asyncio.wrap_future(scheduled)
        return await in_thread(pool, context, read, generation)
    finally:
        watch.cancel()


async def followed(
    pool: ThreadPoolExecutor,
    ask: Callable[[OnText], tuple[Scheduled, Callable[[Chunk], Iterable[T]]]],
    watch: Watch,
) -> AsyncGenerator[T, None]:
    """Yield what is made of an answer's pieces as they come, without a thread of its own.

    Closing this generator, or cancelling who waits for it, cancels the watch.

    Args:
        pool: whose threads ask, and read the last piece.
        ask: gives what `submitted` gave with this ``on_text``, and what reads each piece; the last
            one has no text, but the whole `Generation`.
        watch: of this question.
    """
    loop, context = asyncio.get_running_loop(), contextvars.copy_context()
    texts: asyncio.Queue[str | None] = asyncio.Queue()

    def put(text: str | None) -> None:
        try:
            loop.call_soon_threadsafe(texts.put_nowait, text)
        except RuntimeError:  # the loop was closed: nobody waits
            watch.cancel()

    await asyncio.sleep(0)  # see `answered`
    try:
        scheduled, read = await in_thread(pool, context, ask, put)
        scheduled.add_done_callback(lambda _: put(None))
        while (text := await texts.get()) is not None:
            for made in read(Chunk(text)):
                yield made
        last = Chunk("", scheduled.result())
        # It carries all that is told of the answer, which may take longer than a text.
        for made in await in_thread(pool, context, lambda: list(read(last))):
            yield made
    finally:
        watch.cancel()
