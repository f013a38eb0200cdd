"""Calls of adapters; tests/integrations/test_calls.py leaves and crowds them in both frameworks."""

from __future__ import annotations

import asyncio
import contextvars
import time
from collections.abc import Iterator
from typing import Any

import pytest

from rag_windows import (
    Chunk,
    Generation,
    GenerationTimeoutError,
    integration,
)
from tests.rag_windows import small

LONG = {"min_new_tokens": 200, "max_new_tokens": 200}
WAYS = [1, 32]
"""``max_rows``: each by itself, or together."""


def call(**options: Any) -> integration.Call:
    return integration.Call(lm=small.lm(), query="What?", passages=["a", "b c"], options=options)


def text(_: integration.Call, made: Generation) -> str:
    return made.text


def texts(_: integration.Call, chunk: Chunk) -> Iterator[str]:
    yield chunk.text


@pytest.mark.parametrize("passages", [["a"], []])
@pytest.mark.parametrize("rows", WAYS)
def test_time_that_runs_out_is_an_error(passages: list[str], rows: int) -> None:
    asked = integration.Call(lm=small.lm(), query="What?", passages=passages, options=LONG)
    with pytest.raises(GenerationTimeoutError, match=r"after 0\.05 seconds"):
        integration.Calls(rows).answer(lambda: asked, text, timeout=0.05)


def test_encoding_is_stopped_between_passes() -> None:
    lm = small.lm().__class__(small.model(), small.tokenizer(), max_batch_tokens=8)
    told: list[tuple[int, int]] = []

    def on_encoded(done: int, total: int) -> None:
        told.append((done, total))
        time.sleep(0.1)

    options = {"on_encoded": on_encoded}
    asked = integration.Call(lm=lm, query="What?", passages=["a b"] * 9, options=options)
    with pytest.raises(GenerationTimeoutError):
        integration.Calls().answer(lambda: asked, text, timeout=0.05)
    time.sleep(0.2)
    assert len(told) <= 2


@pytest.mark.parametrize("rows", WAYS)
def test_a_result_or_an_error_comes_to_who_waits(rows: int) -> None:
    variable = contextvars.ContextVar("variable", default="unset")
    variable.set("set")

    def fail() -> integration.Call:
        raise LookupError("lost")

    def read(_: integration.Call, made: Generation) -> str:
        return variable.get()

    calls = integration.Calls(rows)
    assert asyncio.run(calls.answer_async(lambda: call(max_new_tokens=4), read)) == "set"
    with pytest.raises(LookupError, match="lost"):
        asyncio.run(calls.answer_async(fail, text))
    with pytest.raises(LookupError, match="lost"):
        asyncio.run(anext(calls.stream_async(fail, texts)))
