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

import numpy as np
import torch
from transformers import LogitsProcessor

from rag_windows import Passage, WindowedLM
from tests.training.tasks import draw_case

N = 8
PLACES = (0, 3, 5, N - 1)


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


def draw(seed: int, place: int, n: int = N) -> Case | None:
    """A question over ``n`` passages; None where no title tells which one answers it."""
    drawn = draw_case(np.random.default_rng(seed), "single", n)
    question, texts = drawn.messages[-1]["content"], list(drawn.passages)
    right = next((i for i, (title, _) in enumerate(texts) if title and title in question), None)
    if right is None:
        return None
    texts[right], texts[place] = texts[place], texts[right]
    passages = tuple(
        Passage(text, id=f"doc-{i}", title=title, metadata={"title": title, "row": i})
        for i, (title, text) in enumerate(texts)
    )
    return Case(passages, question, drawn.answer, place)


@functools.cache
def case(place: int, n: int = N) -> Case:
    """A question that the reader answers right, when it is asked directly.

    The reader is no oracle: what it gets wrong by itself says nothing of an adapter. So it has to
    be right over the passages as each route words them.
    """
    for seed in range(100 * place, 100 * place + 60):
        drawn = draw(seed, place, n)
        if drawn is not None and all(
            reader().generate(drawn.question, worded, max_new_tokens=16).text == drawn.answer
            for worded in _wordings(drawn.passages)
        ):
            return drawn
    raise RuntimeError(f"The embedded reader answered none of 60 questions at place {place}.")


def _wordings(passages: Sequence[Passage]) -> Iterator[list[Passage]]:
    yield list(passages)
    # LlamaIndex's own wording of a node with its metadata, and CitationQueryEngine's.
    yield [Passage(f"title: {one.title}\n\n{one.text}") for one in passages]
    yield [replace(one, text=f"Source {i}:\n{one.text}\n") for i, one in enumerate(passages, 1)]


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
