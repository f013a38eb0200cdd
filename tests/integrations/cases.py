"""Questions that the embedded reader answers, and calls that are watched token by token."""

from __future__ import annotations

import asyncio
import functools
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import LogitsProcessor

from rag_windows import Passage, WindowedLM
from tests.drawn import questions

PLACES = (0, 3, 5, 7)
"""Of the right passage among the eight of each question."""


@functools.cache
def reader() -> WindowedLM:
    """The embedded reader, loaded once for all tests."""
    return WindowedLM.from_pretrained("tiny-reader")


@dataclass(frozen=True)
class Case:
    """A question that one of the passages answers, the one at ``place``."""

    passages: tuple[Passage, ...]
    question: str
    answer: str
    place: int


def case(place: int) -> Case:
    """A question that the reader answers right, over the passages as each route words them.

    The reader is no oracle: what it gets wrong by itself says nothing of an adapter.
    """
    drawn = questions("read right")[PLACES.index(place)]
    passages = tuple(
        replace(one, id=f"doc-{i}", metadata={"title": one.title, "row": i})
        for i, one in enumerate(drawn.passages)
    )
    return Case(passages, drawn.question, drawn.answer, place)


def one_window_each(windows: Sequence[dict[str, Any]], texts: Sequence[str]) -> bool:
    """Whether the record of an answer has each whole text in a window of its own, in order."""
    names = ("passage", "part", "parts", "start", "end")
    spans = [tuple(window[name] for name in names) for window in windows]
    return spans == [(i, 0, 1, 0, len(text)) for i, text in enumerate(texts)]


LONG: dict[str, Any] = {"min_new_tokens": 400, "max_new_tokens": 400}
"""Options of a call that lasts until somebody ends it."""


class Pace(LogitsProcessor):
    """Takes its time for each token, counts, and may fail."""

    def __init__(
        self, seconds: float = 0.0, *, fails_at: int = 0, error: Exception | None = None
    ) -> None:
        self._seconds, self._fails_at = seconds, fails_at
        self._error = error or RuntimeError("the worker broke")
        self.tokens, self.started = 0, threading.Event()

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.tokens += 1
        if self.tokens == self._fails_at:
            raise self._error
        self.started.set()
        time.sleep(self._seconds)
        return scores

    def settle(self) -> int:
        """Tokens made after now, once nothing moves any more."""
        before = self.tokens
        time.sleep(max(0.1, 5 * self._seconds))
        return self.tokens - before


@contextmanager
def passes(lm: WindowedLM) -> Iterator[list[int]]:
    """How many calls got a token of each forward pass of a model meanwhile."""
    rows = [0]

    def note(_: Any, __: Any, given: dict[str, Any]) -> None:
        newest = given.get("logits_to_keep")
        if isinstance(newest, torch.Tensor):  # of a batch
            rows.append(len(newest))

    hook = lm.model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield rows
    finally:
        hook.remove()


def same_text(got: str, expected: str) -> bool:
    """Whether one answer begins as the other; the last character of a cut one may be broken."""
    short, long = sorted((got.rstrip("\ufffd"), expected.rstrip("\ufffd")), key=len)
    return bool(short) and long.startswith(short)


class Held(LogitsProcessor):
    """A retriever, or a call's token, that waits until an event loop lets it go on.

    A loop that it blocks never does.
    """

    def __init__(self) -> None:
        self.asked, self._let = threading.Event(), threading.Event()

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.retrieve("")
        return scores

    def retrieve(self, query: str, k: int = 8) -> list[Passage]:
        self.asked.set()
        if not self._let.wait(10):
            raise TimeoutError("The event loop stands still.")
        return [Passage("late", id="late", score=1.0)]

    async def beside(self, call: Callable[[], Awaitable[Any]]) -> Any:
        """What the call gives, while the loop goes on."""
        task = asyncio.ensure_future(call())
        while not self.asked.is_set():
            await asyncio.sleep(0.001)
        self._let.set()
        return await task
