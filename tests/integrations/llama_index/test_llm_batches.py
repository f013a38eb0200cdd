"""Calls that are made at once share forward passes, and nothing else."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import pytest
from pydantic import ValidationError

from llama_index.llms.rag_windows import RagWindowsLLM
from rag_windows import InputError
from rag_windows.integration import Calls
from tests.integrations.llama_index import test_llm_async as one_by_one
from tests.integrations.llama_index.endpoints import ASYNC, text_of, user
from tests.integrations.shared_steps import (
    TOKENS,
    Broken,
    Endless,
    assert_shared,
    counted,
    documents,
)
from tests.rag_windows import small

N = 32


def model(**options: Any) -> RagWindowsLLM:
    forced = {"min_new_tokens": TOKENS}
    return RagWindowsLLM(lm=small.lm(), max_new_tokens=TOKENS, generate_kwargs=forced, **options)


def question(i: int) -> str:
    return f"Question {i}?"


@cache
def alone() -> list[str]:
    """What each question is answered by itself, the same for all tests."""
    llm = model()
    return [llm.complete(question(i), passages=documents(i)).text for i in range(N)]


@pytest.mark.parametrize("name", ASYNC)
def test_tasks_share_steps_and_get_their_own_answers(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = model()
    expected = alone()
    steps = counted(monkeypatch)

    async def all_at_once() -> list[Any]:
        return await asyncio.gather(
            *(ASYNC[name](llm, question(i), passages=documents(i)) for i in range(N))
        )

    answers = [responses[-1] for responses in asyncio.run(all_at_once())]
    assert [text_of(answer) for answer in answers] == expected
    assert_shared(steps, N * TOKENS)
    assert max(steps) >= N - 1
    lone = llm.complete(question(3), passages=documents(3)).raw
    assert isinstance(answers[3].raw, dict)
    for key in ("model", "method", "finish_reason", "windows", "notes", "fallback"):
        assert answers[3].raw[key] == lone[key]
    masses = [one["mass"] for one in lone["citations"]]
    assert [one["mass"] for one in answers[3].raw["citations"]] == pytest.approx(masses, abs=1e-5)


def test_threads_share_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = model()
    expected = alone()
    steps = counted(monkeypatch)
    with ThreadPoolExecutor(N) as threads:
        got = list(
            threads.map(lambda i: llm.complete(question(i), passages=documents(i)).text, range(N))
        )
    assert got == expected
    assert len(steps) < sum(steps)


def test_the_number_of_rows_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    async def crowd(llm: RagWindowsLLM) -> list[str]:
        asked = [llm.acomplete(question(i)) for i in range(9)]
        return [one.text for one in await asyncio.gather(*asked)]

    steps = counted(monkeypatch)
    expected = asyncio.run(crowd(model(batch_rows=1)))
    assert not steps
    assert asyncio.run(crowd(model(batch_rows=3))) == expected
    assert max(steps) == 3
    with pytest.raises(ValidationError):
        model(batch_rows=0)
    again = RagWindowsLLM.from_dict(
        json.loads(json.dumps(RagWindowsLLM("tiny-reader", batch_rows=5).to_dict()))
    )
    assert again.batch_rows == 5


def test_an_error_in_one_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = model()
    expected = alone()
    steps = counted(monkeypatch)

    async def all_at_once() -> list[Any]:
        broken: dict[int, dict[str, Any]] = {
            5: {"logits_processor": [Broken()]},
            9: {"num_beams": "two"},
        }
        asked = [
            llm.achat(user(question(i)), passages=documents(i), **broken.get(i, {}))
            for i in range(N)
        ]
        return await asyncio.gather(*asked, return_exceptions=True)

    got = asyncio.run(all_at_once())
    assert isinstance(got[5], RuntimeError)
    assert "broken on purpose" in str(got[5])
    assert isinstance(got[9], InputError)
    rest = [i for i in range(N) if i not in (5, 9)]
    assert [got[i].message.content for i in rest] == [expected[i] for i in rest]
    assert max(steps) > N / 2


@pytest.mark.parametrize("name", ["achat", "astream_chat"])
def test_cancelling_one_leaves_the_others(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = model()
    expected = alone()
    steps = counted(monkeypatch)
    endless = Endless()

    async def cancel() -> list[Any]:
        others = [
            asyncio.ensure_future(llm.acomplete(question(i), passages=documents(i)))
            for i in range(N)
        ]
        options = {"max_new_tokens": 600, "logits_processor": [endless]}
        one = asyncio.ensure_future(ASYNC[name](llm, "Why?", passages=documents(0), **options))
        while endless.calls < 3:
            await asyncio.sleep(0.001)
        one.cancel()
        with pytest.raises(asyncio.CancelledError):
            await one
        at_cancel = endless.calls
        got = await asyncio.gather(*others)
        await asyncio.sleep(0.2)
        assert endless.calls <= at_cancel + 2
        return got

    assert [one.text for one in asyncio.run(cancel())] == expected
    assert max(steps) > 1


@pytest.mark.parametrize("name", one_by_one.CALLS)
def test_what_holds_for_a_lone_call_holds_in_a_batch(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Calls, "lone", lambda self: False)
    steps = counted(monkeypatch)
    one_by_one.test_the_event_loop_keeps_ticking(name)
    one_by_one.test_cancelling_a_task_stops_generation_within_a_token(name)
    if name in ASYNC:
        one_by_one.test_an_error_of_the_worker_surfaces_at_once(name)
        one_by_one.test_what_synthesizers_swallow_comes_as_another_error(name)
    assert steps


@pytest.mark.parametrize("close", [True, False])
def test_a_stream_of_a_batch_that_is_left_stops(
    close: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Calls, "lone", lambda self: False)
    one_by_one.test_an_async_stream_that_is_left_stops("astream_chat", close)
