"""Tasks and threads: the event loop stays free, work ends with its caller, steps are shared."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest

from langchain_rag_windows.errors import RequestError, RequestTimeoutError
from rag_windows import WindowedLM
from tests.integrations.cases import (
    LONG,
    PLACES,
    Crowd,
    Pace,
    case,
    same_text,
    worst_gap,
)
from tests.integrations.langchain.asking import (
    ASYNC,
    chat,
    documents_of,
    text_model,
    text_of,
)
from tests.rag_windows import small

KINDS = pytest.mark.parametrize("kind", [chat, text_model])
NAMES = pytest.mark.parametrize("name", ASYNC)
Kind = Callable[..., Any]


@pytest.fixture(params=["lone", "in a batch"])
def alone_or_not(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lone call is answered by itself; here it is also made to go into the batch."""
    if request.param == "in a batch":
        monkeypatch.setattr("rag_windows.integration.calls.Calls.lone", lambda _: False)


def ask(name: str, model: Any, **options: Any) -> Any:
    """The coroutine of one question over its documents."""
    one = case(PLACES[0])
    return ASYNC[name](model, one.question, documents=documents_of(one), **options)


@pytest.mark.usefixtures("alone_or_not")
@KINDS
@NAMES
def test_the_event_loop_keeps_ticking(kind: Kind, name: str) -> None:
    model = kind()
    steady: dict[str, Any] = {"min_new_tokens": 24, "max_tokens": 24}
    asyncio.run(ask(name, model, **steady))  # loads whatever is loaded on first use
    started = time.process_time()
    asyncio.run(ask(name, model, **steady))
    token = (time.process_time() - started) / 24
    assert asyncio.run(worst_gap(ask(name, model, **steady))) < 0.05 + token


def test_a_blocked_event_loop_would_be_seen() -> None:
    async def blocking() -> None:
        documents = documents_of(case(0))
        chat().invoke("Who?", documents=documents, min_new_tokens=40, max_tokens=40)

    assert asyncio.run(worst_gap(blocking())) > 0.1


@pytest.mark.usefixtures("alone_or_not")
@KINDS
@NAMES
def test_cancelling_stops_within_a_token(kind: Kind, name: str) -> None:
    pace = Pace(0.01)

    async def cancel() -> int:
        task = asyncio.ensure_future(ask(name, kind(), logits_processor=[pace], **LONG))
        while not pace.started.is_set():
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return pace.settle()

    assert asyncio.run(cancel()) <= 2  # the one under way, and the one whose end is awaited


def test_closing_a_stream_stops_it() -> None:
    async def leave(pace: Pace) -> None:
        stream: Any = chat().astream("Who?", documents=["A."], logits_processor=[pace], **LONG)
        await anext(stream)
        await stream.aclose()

    pace = Pace(0.01)
    asyncio.run(leave(pace))
    assert pace.settle() <= 2
    pace = Pace(0.01)
    stream = cast(Any, chat().stream("Who?", documents=["A."], logits_processor=[pace], **LONG))
    next(stream)
    stream.close()
    assert pace.settle() == 0


@pytest.mark.parametrize("limit", [{"concurrency": 1}, {"batch_rows": 2}])
def test_a_call_that_waits_for_its_turn_can_be_cancelled(limit: dict[str, int]) -> None:
    slow, never = Pace(0.01), Pace()
    model = chat(**limit)

    async def crowd() -> None:
        options: dict[str, Any] = {"logits_processor": [slow], **LONG}
        busy = [asyncio.ensure_future(model.ainvoke("Why?", **options)) for _ in range(3)]
        while not slow.started.is_set():
            await asyncio.sleep(0.001)
        late = asyncio.ensure_future(model.ainvoke("Who?", logits_processor=[never]))
        await asyncio.sleep(0.02)
        for one in (late, *busy):
            one.cancel()
        await asyncio.gather(late, *busy, return_exceptions=True)

    asyncio.run(crowd())
    assert never.settle() == never.tokens == 0


@pytest.mark.usefixtures("alone_or_not")
@KINDS
@NAMES
def test_errors_and_timeouts_come_out_at_once(kind: Kind, name: str) -> None:
    model = kind()
    asyncio.run(ask(name, model))
    started = time.process_time()
    with pytest.raises(RuntimeError, match="the worker broke"):
        asyncio.run(ask(name, model, logits_processor=[Pace(fails_at=3)], **LONG))
    assert time.process_time() - started < 1
    with pytest.raises(RequestError, match="list of documents"):
        asyncio.run(ASYNC[name](model, "Who?", documents="one string"))
    slow: dict[str, Any] = {"logits_processor": [Pace(0.01)], **LONG}
    with pytest.raises(RequestTimeoutError, match=r"not complete after 0\.2 seconds"):
        asyncio.run(ask(name, kind(timeout=0.2), **slow))
    with pytest.raises(RequestTimeoutError):
        model.invoke("Who?", timeout=0.1, **slow)
    assert text_of(asyncio.run(ask(name, model))) == case(PLACES[0]).answer, "it serves on"


def test_many_calls_over_their_own_documents_all_answer_right() -> None:
    cases = [case(place) for place in PLACES] * 4

    async def all_at_once() -> list[Any]:
        model = chat()
        return await asyncio.gather(
            *(ASYNC["ainvoke"](model, one.question, documents=documents_of(one)) for one in cases)
        )

    assert [one.text for one in asyncio.run(all_at_once())] == [one.answer for one in cases]
    blocks: list[Any] = [
        [
            (
                "human",
                [
                    *({"type": "text-plain", "text": p.text} for p in one.passages),
                    {"type": "text", "text": one.question},
                ],
            )
        ]
        for one in cases[:4]
    ]
    alone = [chat().invoke(one).text for one in blocks]
    assert [one.text for one in chat().batch(blocks)] == alone


# Calls that are made at once

COUNT = 16
DOCUMENTS = tuple(f"Document {i}: " + "abcdefgh"[i] * (9 + 4 * (i % 3)) for i in range(8))
QUESTIONS = [f"Question {i}?" for i in range(COUNT)]


def documents(i: int) -> list[str]:
    """Two that all questions read, and one that every sixth reads."""
    return [*DOCUMENTS[:2], DOCUMENTS[2 + i % 6]]


def crowded(kind: Kind = chat, **options: Any) -> Any:
    return kind(**{"lm": small.lm(), "max_tokens": 400, "generate_kwargs": LONG, **options})


def expected(i: int, same: bool = False, **options: Any) -> str:
    """What a question is answered by itself."""
    model = crowded(**{"max_tokens": 12, "generate_kwargs": {"min_new_tokens": 12}, **options})
    return text_of(model.invoke(QUESTIONS[i], documents=documents(0 if same else i)))


def assert_their_own(answers: list[Any], same: bool = False) -> None:
    for i in (0, 1, 5, len(answers) - 1):
        assert same_text(text_of(answers[i]), expected(i, same))


@KINDS
@NAMES
def test_tasks_share_steps_and_get_their_own_answers(kind: Kind, name: str) -> None:
    model = crowded(kind)

    async def all_at_once() -> list[Any]:
        return await asyncio.gather(
            *(
                ASYNC[name](model, question, documents=documents(i), **crowd.member())
                for i, question in enumerate(QUESTIONS)
            )
        )

    with Crowd(small.lm(), COUNT) as crowd:
        answers = asyncio.run(all_at_once())
    # The first of many may be taken for a lone one, which generates outside of the batch.
    assert COUNT - 1 <= crowd.shared() <= COUNT
    assert_their_own(answers)


@KINDS
@pytest.mark.parametrize("limit", [None, 8])
def test_batches_share_steps(kind: Kind, limit: int | None) -> None:
    model = crowded(kind)
    config = None if limit is None else {"max_concurrency": limit}
    for way in ("batch", "abatch"):
        at_once = limit or (COUNT if way == "abatch" else 4)  # a pool has few threads
        with Crowd(small.lm(), at_once) as crowd:
            options = {"documents": documents(0), **crowd.member()}
            made = getattr(model, way)(QUESTIONS, config=config, **options)
            answers = made if way == "batch" else asyncio.run(made)
        assert_their_own(answers, same=True)
        assert at_once - 1 <= crowd.shared() <= (limit or COUNT)


def test_several_prompts_of_one_call_share_steps() -> None:
    with Crowd(small.lm(), COUNT) as crowd:
        options = {"documents": documents(0), **crowd.member()}
        result = crowded(text_model).generate(QUESTIONS, **options)
    assert crowd.shared() == COUNT
    assert_their_own([made[0].text for made in result.generations], same=True)


def test_threads_share_steps() -> None:
    model = crowded()
    with Crowd(small.lm(), COUNT) as crowd, ThreadPoolExecutor(COUNT) as threads:
        answers = list(
            threads.map(
                lambda i: model.invoke(QUESTIONS[i], documents=documents(i), **crowd.member()),
                range(COUNT),
            )
        )
    assert crowd.shared() >= COUNT - 1
    assert_their_own(answers)


@pytest.mark.parametrize(
    ("options", "rows"),
    [
        ({"batch_rows": 1}, 1),
        ({"concurrency": 1}, 1),
        ({"batch_rows": 3}, 3),
        ({"concurrency": 3}, 3),
        ({"batch_rows": 3, "concurrency": 9}, 3),
    ],
)
def test_the_number_of_rows_is_kept(options: dict[str, Any], rows: int) -> None:
    model = crowded(**options)

    async def all_at_once() -> None:
        asked = (model.ainvoke(question, **crowd.member()) for question in QUESTIONS[:8])
        await asyncio.gather(*asked)

    with Crowd(small.lm(), rows) as crowd:
        asyncio.run(all_at_once())
    assert crowd.shared() == rows


def test_an_answer_tells_all_that_it_told_before() -> None:
    forced: dict[str, Any] = {"max_tokens": 12, "generate_kwargs": {"min_new_tokens": 12}}
    for options in (forced, {**forced, "temperature": 1.0, "seed": 7}):
        model = crowded(**options)
        alone = model.invoke(QUESTIONS[0], documents=documents(0))

        async def both(model: Any = model) -> list[Any]:
            asked = (model.ainvoke(QUESTIONS[0], documents=documents(0)) for _ in range(2))
            return await asyncio.gather(*asked)

        for answer in asyncio.run(both()):
            mine, other = dict(answer.response_metadata), dict(alone.response_metadata)
            # Time is its own, and masses are rounded otherwise.
            assert mine.pop("timings").keys() == other.pop("timings").keys()
            masses = [one.pop("mass") for one in map(dict, other["citations"])]
            assert [one["mass"] for one in mine.pop("citations")] == pytest.approx(masses, abs=1e-5)
            del other["citations"]
            assert (answer.text, mine) == (alone.text, other)
            assert answer.usage_metadata["output_tokens"] == 12


def test_models_of_one_engine_share_steps() -> None:
    lm = WindowedLM.from_pretrained(small.model(), tokenizer=small.tokenizer())
    models = [crowded(lm=lm), crowded(text_model, lm=lm), crowded(lm=lm)]
    with Crowd(lm, 12) as crowd, ThreadPoolExecutor(3) as threads:
        asked = ["Why?", "Who?", "When?", "Where?"]
        made = [threads.submit(one.batch, asked, **crowd.member()) for one in models]
        answers = [[text_of(one)[:6] for one in each.result()] for each in made]
    assert answers[0] == answers[1] == answers[2]
    assert crowd.shared() >= 11


@NAMES
def test_what_befalls_one_leaves_the_others(name: str) -> None:
    model = crowded()
    endless, broken = Pace(), Pace(fails_at=3)
    befalls: dict[int, dict[str, Any]] = {
        5: {"logits_processor": [broken]},
        7: {"timeout": 0.3, "logits_processor": [Pace(0.001)]},
        9: {"documents": "one string"},
        11: {"logits_processor": [endless]},
    }

    async def all_at_once() -> list[Any]:
        tasks = []
        for i, question in enumerate(QUESTIONS):
            own = befalls.get(i, crowd.member())
            options = {"documents": documents(i), **own}
            tasks.append(asyncio.ensure_future(ASYNC[name](model, question, **options)))
        while endless.tokens < 3:
            await asyncio.sleep(0.001)
        tasks[11].cancel()
        got = await asyncio.gather(*tasks, return_exceptions=True)
        assert endless.settle() == 0
        return got

    with Crowd(small.lm(), COUNT - len(befalls)) as crowd:
        got = asyncio.run(all_at_once())
    kinds = {5: RuntimeError, 7: RequestTimeoutError, 9: RequestError, 11: asyncio.CancelledError}
    assert {i: type(got[i]) for i in befalls} == kinds
    for i in (0, 4, 6, 15):
        assert same_text(text_of(got[i]), expected(i))
    assert crowd.shared() >= COUNT - len(befalls) - 1
