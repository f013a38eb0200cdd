"""Calls that are made at once share forward passes, and nothing else."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest
from pydantic import ValidationError

from langchain_rag_windows import ChatRagWindows, RagWindows
from rag_windows import WindowedLM
from tests.integrations.langchain.crowd import N, alone, model, questions, text_of
from tests.integrations.shared_steps import (
    TOKENS,
    assert_shared,
    counted,
    documents,
)
from tests.rag_windows import small


@pytest.mark.parametrize("kind", [ChatRagWindows, RagWindows])
def test_tasks_share_steps_and_get_their_own_answers(
    kind: type[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = model(kind)
    expected = alone(kind)
    steps = counted(monkeypatch)

    async def all_at_once() -> list[Any]:
        return await asyncio.gather(
            *(llm.ainvoke(q, documents=documents(i)) for i, q in enumerate(questions()))
        )

    assert [text_of(one) for one in asyncio.run(all_at_once())] == expected
    assert_shared(steps, N * TOKENS)
    assert max(steps) >= N - 1

    async def streamed(i: int, question: str) -> str:
        return "".join(
            [text_of(piece) async for piece in llm.astream(question, documents=documents(i))]
        )

    async def all_streams() -> list[str]:
        return await asyncio.gather(*(streamed(i, q) for i, q in enumerate(questions())))

    steps.clear()
    assert asyncio.run(all_streams()) == expected
    assert_shared(steps, N * TOKENS)


def test_an_answer_tells_all_that_it_told_before(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = model()
    alone = llm.invoke("Question 0?", documents=documents(0))
    steps = counted(monkeypatch)

    async def both() -> list[Any]:
        return await asyncio.gather(
            *(llm.ainvoke("Question 0?", documents=documents(0)) for _ in range(2))
        )

    for answer in asyncio.run(both()):
        mine, other = dict(answer.response_metadata), dict(alone.response_metadata)
        # Time is its own, and masses are rounded otherwise.
        assert mine.pop("timings").keys() == other.pop("timings").keys()
        assert mine.pop("citations") == masses(other.pop("citations"))
        assert mine == other
        assert answer.usage_metadata["output_tokens"] == TOKENS
        assert answer.usage_metadata["input_tokens"] == alone.usage_metadata["input_tokens"]
    assert max(steps) == 2


def masses(citations: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**one, "mass": pytest.approx(one["mass"], abs=1e-5)} for one in citations]


@pytest.mark.parametrize("kind", [ChatRagWindows, RagWindows])
@pytest.mark.parametrize("config", [{}, {"max_concurrency": 8}])
def test_batches_share_steps(
    kind: type[Any], config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = model(kind)
    asked, expected = questions()[:16], alone(kind, same=True)[:16]
    steps = counted(monkeypatch)
    got = llm.batch(asked, config=config or None, documents=documents(0))
    assert [text_of(one) for one in got] == expected
    assert len(steps) < 16 * TOKENS * 0.7
    if config:
        assert 2 <= max(steps) <= 8
    steps.clear()
    got = asyncio.run(llm.abatch(asked, config=config or None, documents=documents(0)))
    assert [text_of(one) for one in got] == expected
    assert_shared(steps, 16 * TOKENS)


def test_several_prompts_of_one_call_share_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = model(RagWindows)
    steps = counted(monkeypatch)
    result = llm.generate(questions(), documents=documents(0))
    assert_shared(steps, N * TOKENS)
    assert [made[0].text for made in result.generations] == alone(RagWindows, same=True)


def test_threads_share_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = model()
    expected = alone()
    steps = counted(monkeypatch)
    with ThreadPoolExecutor(N) as threads:
        got = list(
            threads.map(
                lambda i: text_of(llm.invoke(f"Question {i}?", documents=documents(i))), range(N)
            )
        )
    assert got == expected
    # Which of them come while others are answered is chance.
    assert len(steps) < sum(steps)


@pytest.mark.parametrize("options", [{"batch_rows": 1}, {"concurrency": 1}])
def test_without_batches_each_call_generates(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = model(**options)
    steps = counted(monkeypatch)
    asked = questions()[:8]

    async def all_at_once() -> list[Any]:
        return await asyncio.gather(*(llm.ainvoke(q, documents=["A text."]) for q in asked))

    texts = [text_of(one) for one in asyncio.run(all_at_once())]
    assert not steps
    assert texts == [text_of(llm.invoke(q, documents=["A text."])) for q in asked]


def test_the_number_of_rows_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[dict[str, Any]] = [
        {"batch_rows": 3},
        {"concurrency": 3},
        {"batch_rows": 3, "concurrency": 9},
    ]
    for options in kept:
        steps = counted(monkeypatch)
        asyncio.run(model(**options).abatch(questions()[:12]))
        assert max(steps) == 3
        monkeypatch.undo()
    refused: list[dict[str, Any]] = [{"batch_rows": 0}, {"concurrency": 0}]
    for options in refused:
        with pytest.raises(ValidationError):
            model(**options)


def test_sampling_with_a_seed_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = model(temperature=1.0, seed=7)
    expected = [
        text_of(llm.invoke(q, documents=documents(i))) for i, q in enumerate(questions()[:8])
    ]
    steps = counted(monkeypatch)

    async def all_at_once() -> list[Any]:
        asked = enumerate(questions()[:8])
        return await asyncio.gather(*(llm.ainvoke(q, documents=documents(i)) for i, q in asked))

    assert [text_of(one) for one in asyncio.run(all_at_once())] == expected
    assert steps


def test_models_of_one_engine_share_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    lm = WindowedLM.from_pretrained(small.model(), tokenizer=small.tokenizer())
    chats = [model(lm=lm), model(RagWindows, lm=lm), model(lm=lm)]
    steps = counted(monkeypatch)
    started = threading.Barrier(3)

    def ask(llm: Any) -> str:
        started.wait()
        return text_of(asyncio.run(cast(Any, llm).abatch(["Why?"] * 4))[0])

    with ThreadPoolExecutor(3) as threads:
        assert len(set(threads.map(ask, chats))) <= 2
    assert max(steps) > 4
