"""Calls run beside each other: several at once, or beside an event loop."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Iterator, Sequence
from contextlib import aclosing, closing
from typing import TypeVar

from langchain_rag_windows.calls import Call
from langchain_rag_windows.errors import in_langchain_terms
from langchain_rag_windows.options import EngineOptions
from rag_windows import Chunk, Generation
from rag_windows.batching.awaiting import answered, followed
from rag_windows.batching.questions import OnText
from rag_windows.batching.scheduler import Scheduled
from rag_windows.streaming import Watch, iterate, run

T = TypeVar("T")

Prepare = Callable[[], Call]
"""Makes a call, with its watch."""


def together(calls: Sequence[Call]) -> list[Generation]:
    """Run several calls of one model to the end."""
    if len(calls) < 2 or calls[0].rows == 1:
        return [call.whole() for call in calls]
    try:
        with calls[0].crowd.entered():  # so that the first is not taken for a lone one
            asked = [call.submit() for call in calls]
        answers = []
        for call, scheduled in zip(calls, asked, strict=True):
            with in_langchain_terms():
                answers.append(scheduled.result())
                call.watch.check()
        return answers
    finally:
        for call in calls:
            call.watch.cancel()


async def finished(
    model: EngineOptions, watch: Watch, call: Prepare, read: Callable[[Call, Generation], T]
) -> T:
    """Make and run a call beside the event loop; cancelling who waits stops it within a token.

    Args:
        model: whose threads do what would hold the event loop up.
        watch: of the call.
        call: makes it.
        read: what becomes of the answer.
    """

    def by_itself() -> T:
        made = call()
        return read(made, made.whole())

    def asked() -> tuple[Scheduled, Callable[[Generation], T]]:
        made = call()

        def checked(generation: Generation) -> T:
            watch.check()
            return read(made, generation)

        return made.submit(), checked

    with model.crowd.entered(), in_langchain_terms():
        if model.rows == 1:
            return await run(model._pool(), by_itself, watch)
        return await answered(model._pool(), asked, watch)


async def streamed(
    model: EngineOptions, watch: Watch, call: Prepare, read: Callable[[Call, Chunk], Iterable[T]]
) -> AsyncGenerator[T, None]:
    """Make and run a call beside the event loop, piece by piece.

    Args:
        model: see `finished`.
        watch: of the call; closing this cancels it.
        call: makes it.
        read: what becomes of each piece.
    """

    def by_itself() -> Generator[T, None, None]:
        made = call()
        with closing(made.pieces()) as chunks:
            for chunk in chunks:
                yield from read(made, chunk)

    def asked(on_text: OnText) -> tuple[Scheduled, Callable[[Chunk], Iterable[T]]]:
        made = call()

        def checked(chunk: Chunk) -> Iterator[T]:
            watch.check()
            yield from read(made, chunk)

        return made.submit(on_text), checked

    pool = model._pool()
    pieces = iterate(pool, by_itself, watch) if model.rows == 1 else followed(pool, asked, watch)
    with model.crowd.entered(), in_langchain_terms():
        async with aclosing(pieces):
            async for piece in pieces:
                yield piece
