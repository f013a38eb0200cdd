"""Streams that LlamaIndex reports on, and that end when they are closed."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Generator
from typing import Any, TypeVar

T = TypeVar("T")

Reporter = Callable[[Callable[..., Any]], Callable[..., Any]]
"""``llm_chat_callback()`` or ``llm_completion_callback()``."""


def reported(
    report: Reporter,
    make: Callable[..., Generator[T, None, None]],
    *arguments: Any,
    **options: Any,
) -> Generator[T, None, None]:
    """A stream with its callbacks and events.

    LlamaIndex's reporting decorator leaves closing what it wraps to the garbage collector, which
    never does while a handler keeps the exception that ended the stream. So both are closed here.

    Args:
        report: the decorator.
        make: checks its arguments and makes the stream.
        arguments: of ``make``; the first one is the LLM, which the decorator asks for its handlers.
        options: of ``make``.
    """
    made: list[Generator[T, None, None]] = []

    def call(*positional: Any, **keywords: Any) -> Generator[T, None, None]:
        made.append(make(*positional, **keywords))
        return made[0]

    return _closing(report(call)(*arguments, **options), made)


async def areported(
    report: Reporter,
    make: Callable[..., AsyncGenerator[T, None]],
    *arguments: Any,
    **options: Any,
) -> AsyncGenerator[T, None]:
    """`reported` for asynchronous streams."""
    made: list[AsyncGenerator[T, None]] = []

    async def call(*positional: Any, **keywords: Any) -> AsyncGenerator[T, None]:
        made.append(make(*positional, **keywords))
        return made[0]

    return _aclosing(await report(call)(*arguments, **options), made)


def _closing(
    outer: Generator[T, None, None], made: list[Generator[T, None, None]]
) -> Generator[T, None, None]:
    try:
        yield from outer
    finally:
        for inner in made:
            inner.close()


async def _aclosing(
    outer: AsyncGenerator[T, None], made: list[AsyncGenerator[T, None]]
) -> AsyncGenerator[T, None]:
    try:
        async for item in outer:
            yield item
    finally:
        await outer.aclose()
        for inner in made:
            await inner.aclose()
