"""Questions of one scheduler, awaited beside an event loop."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from rag_windows.background import Watch, in_thread
from rag_windows.batch.crowd import Crowd
from rag_windows.batch.request import BatchRequest
from rag_windows.batch.scheduled import Scheduled
from rag_windows.batch.ticket import OnText
from rag_windows.generation import Chunk, Generation

if TYPE_CHECKING:
    from rag_windows.model import WindowedLM

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
