"""Errors, cancelling, time and the event loop where calls share forward passes."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from langchain_rag_windows.errors import RequestError, RequestTimeoutError
from rag_windows.integration import Calls
from tests.integrations.langchain import test_async as one_by_one
from tests.integrations.langchain.crowd import N, alone, model, questions, text_of
from tests.integrations.langchain.drawn import answered
from tests.integrations.shared_steps import Broken, Endless, counted, documents


def test_an_error_in_one_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = model()
    expected = alone()
    steps = counted(monkeypatch)

    async def ask(i: int, question: str) -> Any:
        broken = {"logits_processor": [Broken()]} if i == 5 else {}
        given: Any = "one string" if i == 9 else documents(i)
        return await llm.ainvoke(question, documents=given, **broken)

    async def all_at_once() -> list[Any]:
        asked = [ask(i, question) for i, question in enumerate(questions())]
        return await asyncio.gather(*asked, return_exceptions=True)

    got = asyncio.run(all_at_once())
    assert isinstance(got[5], RuntimeError)
    assert "broken on purpose" in str(got[5])
    assert isinstance(got[9], RequestError)
    rest = [i for i in range(N) if i not in (5, 9)]
    assert [text_of(got[i]) for i in rest] == [expected[i] for i in rest]
    assert max(steps) > N / 2


@pytest.mark.parametrize("way", ["ainvoke", "astream"])
def test_cancelling_one_leaves_the_others(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = model()
    expected = alone()
    steps = counted(monkeypatch)
    endless = Endless()

    async def ask_for_ever() -> None:
        options = {"max_tokens": 600, "logits_processor": [endless]}
        if way == "ainvoke":
            await llm.ainvoke("Why?", documents=documents(0), **options)
        else:
            async for _ in llm.astream("Why?", documents=documents(0), **options):
                pass

    async def cancel() -> list[Any]:
        asked = enumerate(questions())
        others = [asyncio.ensure_future(llm.ainvoke(q, documents=documents(i))) for i, q in asked]
        one = asyncio.ensure_future(ask_for_ever())
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

    assert [text_of(one) for one in asyncio.run(cancel())] == expected
    assert max(steps) > 1


def test_a_cancelled_call_that_waits_in_line_is_never_read() -> None:
    llm = model(batch_rows=2)
    endless, never = Endless(), Endless()

    async def crowd() -> None:
        options = {"max_tokens": 200, "logits_processor": [endless]}
        busy = [asyncio.ensure_future(llm.ainvoke("Why?", **options)) for _ in range(3)]
        while endless.calls < 4:
            await asyncio.sleep(0.001)
        late = asyncio.ensure_future(llm.ainvoke("Who?", logits_processor=[never]))
        await asyncio.sleep(0.02)
        for one in (late, *busy):
            one.cancel()
        await asyncio.gather(late, *busy, return_exceptions=True)

    asyncio.run(crowd())
    time.sleep(0.2)
    assert never.calls == 0


@pytest.fixture
def crowded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Every call goes into the batch, a lone one as well."""
    monkeypatch.setattr(Calls, "lone", lambda self: False)
    return counted(monkeypatch)


@pytest.mark.parametrize(("made", "way"), one_by_one.WAYS)
def test_what_holds_for_a_lone_call_holds_in_a_batch(
    made: Any, way: Any, crowded: list[int]
) -> None:
    one_by_one.test_cancelling_stops_within_a_token(made, way)
    one_by_one.test_an_error_in_the_worker_comes_in_less_than_a_second(made, way)
    one_by_one.test_a_timeout_is_an_error_not_half_an_answer(made, way)
    one_by_one.test_the_event_loop_keeps_ticking(made, way)
    drawn = answered(5)
    assert asyncio.run(way(made(), drawn)) == drawn.answer
    assert crowded


def test_the_event_loop_ticks_while_many_are_answered() -> None:
    llm = one_by_one.chat()
    drawn = [answered(place) for place in range(0, 16, 2)] * 2

    async def all_at_once() -> None:
        await asyncio.gather(*(one_by_one.asked(llm, one) for one in drawn))

    asyncio.run(all_at_once())
    started = time.process_time()
    asyncio.run(one_by_one.asked(llm, drawn[0]))
    one = time.process_time() - started
    # A pass takes the machine for all rows, but the loop has its turn beside it.
    assert asyncio.run(one_by_one.worst_gap(all_at_once())) < 0.05 + 2 * one


def test_a_timeout_ends_one_of_many() -> None:
    llm = model()

    async def ask() -> Any:
        long = {"max_tokens": 900, "logits_processor": [Endless()], "timeout": 0.3}
        return await asyncio.gather(
            llm.ainvoke("Why?", **long), llm.ainvoke("Who?"), return_exceptions=True
        )

    late, other = asyncio.run(ask())
    assert isinstance(late, RequestTimeoutError)
    assert text_of(other) == text_of(llm.invoke("Who?"))
