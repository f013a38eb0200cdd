"""A retriever that takes a second, and how long an event loop stands still meanwhile."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from rag_windows import Passage


class Slow:
    """Answers after a second."""

    def retrieve(self, query: str, k: int = 8) -> list[Passage]:
        time.sleep(1)
        return [Passage("late", id="late", score=1.0)]


async def longest_gap(call: Callable[[], Awaitable[object]]) -> float:
    """Seconds between two ticks, at most, while the call runs."""
    task = asyncio.ensure_future(call())
    gaps, before = [0.0], time.monotonic()
    while not task.done():
        await asyncio.sleep(0.01)
        now = time.monotonic()
        gaps.append(now - before)
        before = now
    await task
    return max(gaps)
