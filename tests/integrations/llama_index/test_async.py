"""Tasks, threads and events: the loop stays free, work ends with its caller, steps are shared."""

from __future__ import annotations

import asyncio
import gc
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from inspect import BoundArguments
from typing import Any

import pytest
from llama_index.core.bridge.pydantic import PrivateAttr
from llama_index.core.callbacks import (
    CallbackManager,
    CBEventType,
    EventPayload,
    LlamaDebugHandler,
    TokenCountingHandler,
)
from llama_index_instrumentation import get_dispatcher
from llama_index_instrumentation.span import SimpleSpan
from llama_index_instrumentation.span_handlers import SimpleSpanHandler

from llama_index.llms.rag_windows import Parts, RagWindowsLLM
from rag_windows import GenerationError, InputError
from tests.integrations.cases import (
    LONG,
    PLACES,
    Crowd,
    Pace,
    case,
    reader,
    same_text,
    worst_gap,
)
from tests.integrations.llama_index.asking import (
    AWAITED,
    BARE,
    ENDPOINTS,
    NAMES,
    WAYS,
    ask,
    asked,
    llm,
    nodes_of,
    question,
    text_of,
    told,
    user,
)
from tests.rag_windows import small

EACH = pytest.mark.parametrize(("verb", "way"), ENDPOINTS)
EACH_AWAITED = pytest.mark.parametrize(("verb", "way"), AWAITED)


@pytest.fixture(params=["lone", "in a batch"])
def alone_or_not(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lone call is answered by itself; here it is also made to go into the batch."""
    if request.param == "in a batch":
        monkeypatch.setattr("rag_windows.integration.calls.Calls.lone", lambda _: False)


def slow(*paces: Pace, **options: Any) -> RagWindowsLLM:
    given = {**LONG, "logits_processor": list(paces)}
    return RagWindowsLLM(lm=reader(), generate_kwargs=given, **options)


def awaited(verb: str, way: str, model: RagWindowsLLM) -> Any:
    """The coroutine of one question over its passages."""
    one = case(PLACES[0])
    if verb == "predict":
        parts = Parts.of(one.passages)
        return asked(model, verb, way, BARE, context_str=parts, query_str=one.question)
    return asked(model, verb, way, question(verb, one.question), passages=one.passages)


@pytest.mark.usefixtures("alone_or_not")
@EACH_AWAITED
def test_the_event_loop_keeps_ticking(verb: str, way: str) -> None:
    steady = {"min_new_tokens": 24}
    model = RagWindowsLLM(lm=reader(), max_new_tokens=24, generate_kwargs=steady)
    asyncio.run(awaited(verb, way, model))  # loads whatever is loaded on first use
    started = time.process_time()
    asyncio.run(awaited(verb, way, model))
    token = (time.process_time() - started) / 24
    assert asyncio.run(worst_gap(awaited(verb, way, model))) < 0.05 + token


def test_a_blocked_event_loop_would_be_seen() -> None:
    async def blocking() -> None:
        options: dict[str, Any] = {"min_new_tokens": 40, "max_new_tokens": 40}
        llm().complete("Where?", nodes=nodes_of(case(PLACES[0])), **options)

    assert asyncio.run(worst_gap(blocking())) > 0.1


@pytest.mark.usefixtures("alone_or_not")
@EACH_AWAITED
def test_cancelling_a_task_stops_generation_within_a_token(verb: str, way: str) -> None:
    async def cancel() -> int:
        pace = Pace(0.01)
        task = asyncio.ensure_future(awaited(verb, way, slow(pace)))
        while not pace.started.is_set():
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return pace.settle()

    assert asyncio.run(cancel()) <= 1


@pytest.mark.usefixtures("alone_or_not")
@pytest.mark.parametrize("verb", ["chat", "complete"])
@pytest.mark.parametrize("close", [True, False])
def test_an_async_stream_that_is_left_stops(verb: str, close: bool) -> None:
    """Closed, or left by break: then the loop closes it when nothing refers to it."""

    async def leave() -> int:
        pace = Pace(0.01)
        model = slow(pace)
        stream: Any = await getattr(model, NAMES[verb][3])(question(verb, "Where?"))
        async for _ in stream:
            break
        if close:
            await stream.aclose()
        else:
            del stream
            gc.collect()
            await asyncio.sleep(0.01)
        return pace.settle()

    assert asyncio.run(leave()) <= 1


@pytest.mark.parametrize("rows", [1, 4])
def test_waiting_calls_that_are_cancelled_do_no_work(rows: int) -> None:
    async def crowd() -> int:
        pace = Pace(0.01)
        model = slow(pace, batch_rows=rows)
        tasks = [asyncio.ensure_future(model.acomplete("Where?")) for _ in range(12)]
        await asyncio.to_thread(pace.started.wait)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return pace.settle()

    assert asyncio.run(crowd()) <= 4


def test_serving_pressure() -> None:
    cases = [case(place) for place in PLACES] * 4

    async def serve() -> list[Any]:
        questions = (llm().achat(user(one.question), nodes=nodes_of(one)) for one in cases)
        return await asyncio.gather(*questions)

    responses = asyncio.run(serve())
    assert [text_of(response) for response in responses] == [one.answer for one in cases]
    for response, one in zip(responses, cases, strict=True):
        assert [entry["id"] for entry in response.raw["citations"]] == [p.id for p in one.passages]


# Calls that are made at once

COUNT = 16
DOCUMENTS = tuple(f"Document {i}: " + "abcdefgh"[i] * (9 + 4 * (i % 3)) for i in range(8))


def passages(i: int) -> list[str]:
    """Two that all questions read, and one that every sixth reads."""
    return [*DOCUMENTS[:2], DOCUMENTS[2 + i % 6]]


def crowded(**options: Any) -> RagWindowsLLM:
    return RagWindowsLLM(lm=small.lm(), generate_kwargs=LONG, **options)


def alone(i: int) -> Any:
    """What a question is answered by itself."""
    options: dict[str, Any] = {"min_new_tokens": 12, "max_new_tokens": 12}
    return crowded().complete(f"Question {i}?", passages=passages(i), **options)


def assert_their_own(answers: list[Any]) -> None:
    for i in (0, 1, 5, COUNT - 1):
        assert same_text(text_of(answers[i]), alone(i).text)


@pytest.mark.parametrize(("verb", "way"), AWAITED[:4])
def test_tasks_share_steps_and_get_their_own_answers(verb: str, way: str) -> None:
    async def all_at_once(model: RagWindowsLLM) -> list[Any]:
        calls = (
            asked(
                *(model, verb, way, question(verb, f"Question {i}?")),
                passages=passages(i),
                **crowd.member(),
            )
            for i in range(COUNT)
        )
        return [pieces[-1] for _, pieces in await asyncio.gather(*calls)]

    with Crowd(small.lm(), COUNT) as crowd:
        answers = asyncio.run(all_at_once(crowded()))
    # The first of many may be taken for a lone one, which generates outside of the batch.
    assert COUNT - 1 <= crowd.shared() <= COUNT
    assert_their_own(answers)
    raw, lone = answers[3].raw, alone(3).raw
    for key in ("model", "method", "windows", "notes", "fallback"):
        assert raw[key] == lone[key]


def test_threads_share_steps() -> None:
    model = crowded()
    with Crowd(small.lm(), COUNT) as crowd, ThreadPoolExecutor(COUNT) as threads:
        asking = [
            threads.submit(model.complete, f"Question {i}?", passages=passages(i), **crowd.member())
            for i in range(COUNT)
        ]
        answers = [one.result() for one in asking]
    assert crowd.shared() >= COUNT - 1
    assert_their_own(answers)


@pytest.mark.parametrize("rows", [1, 3])
def test_the_number_of_rows_is_kept(rows: int) -> None:
    async def all_at_once(model: RagWindowsLLM) -> None:
        await asyncio.gather(
            *(model.acomplete(f"Question {i}?", **crowd.member()) for i in range(8))
        )

    with Crowd(small.lm(), rows) as crowd:
        asyncio.run(all_at_once(crowded(batch_rows=rows)))
    assert crowd.shared() == rows


@pytest.mark.parametrize("way", ["async", "astream"])
def test_what_befalls_one_leaves_the_others(way: str) -> None:
    endless = Pace()
    befalls: dict[int, dict[str, Any]] = {
        5: {"logits_processor": [Pace(fails_at=3)]},
        9: {"num_beams": "two"},
        11: {"logits_processor": [endless]},
    }

    async def all_at_once() -> list[Any]:
        model, tasks = crowded(), []
        for i in range(COUNT):
            options = {"passages": passages(i), **befalls.get(i, crowd.member())}
            call = asked(model, "chat", way, user(f"Question {i}?"), **options)
            tasks.append(asyncio.ensure_future(call))
        while endless.tokens < 3:
            await asyncio.sleep(0.001)
        tasks[11].cancel()
        got = await asyncio.gather(*tasks, return_exceptions=True)
        assert endless.settle() == 0
        return got

    with Crowd(small.lm(), COUNT - len(befalls)) as crowd:
        got = asyncio.run(all_at_once())
    kinds = {5: RuntimeError, 9: InputError, 11: asyncio.CancelledError}
    assert {i: type(got[i]) for i in befalls} == kinds
    for i in (0, 4, 6, 15):
        assert same_text(text_of(got[i][1][-1]), alone(i).text)
    assert crowd.shared() >= COUNT - len(befalls) - 1


# Callbacks and events


class Spans(SimpleSpanHandler):
    """Keeps the names of the spans that were entered."""

    _names: list[str] = PrivateAttr(default_factory=list)

    def new_span(
        self, id_: str, bound_args: BoundArguments, *arguments: Any, **options: Any
    ) -> SimpleSpan:
        self._names.append(id_.partition("-")[0])
        return super().new_span(id_, bound_args, *arguments, **options)


@pytest.fixture
def spans() -> Iterator[list[str]]:
    handler, root = Spans(), get_dispatcher()
    before = list(root.span_handlers)
    root.add_span_handler(handler)
    yield handler._names
    root.span_handlers = before


def watched(*paces: Pace) -> tuple[RagWindowsLLM, LlamaDebugHandler, TokenCountingHandler]:
    debug, tokens = LlamaDebugHandler(print_trace_on_end=False), TokenCountingHandler()
    manager = CallbackManager([debug, tokens])
    given = {"min_new_tokens": 5, "logits_processor": list(paces)}
    options: dict[str, Any] = {"max_new_tokens": 5, "generate_kwargs": given}
    return RagWindowsLLM(lm=reader(), callback_manager=manager, **options), debug, tokens


@EACH
def test_each_call_is_told_once(verb: str, way: str, spans: list[str]) -> None:
    model, debug, tokens = watched()
    texts = ["Here.", "There."]
    with told() as seen:
        _, _, pieces = ask(model, verb, way, question(verb, "Where?"), passages=texts)
    kind = "Completion" if verb == "complete" else "Chat"
    expected = {f"LLM{kind}StartEvent": 1, f"LLM{kind}EndEvent": 1}
    if "stream" in way:
        expected[f"LLM{kind}InProgressEvent"] = len(pieces)
    assert Counter(type(event).__name__ for event in seen.events) == expected
    assert spans == [f"RagWindowsLLM.{NAMES[verb][WAYS.index(way)]}"]
    ((start, end),) = debug.get_llm_inputs_outputs()
    assert EventPayload.SERIALIZED in (start.payload or {})
    said = EventPayload.COMPLETION if verb == "complete" else EventPayload.RESPONSE
    assert (end.payload or {})[said] is pieces[-1]
    usage = pieces[-1].raw["usage"]
    assert tokens.completion_llm_token_count == usage["completion_tokens"] == 5
    assert tokens.prompt_llm_token_count == usage["prompt_tokens"]


@pytest.mark.parametrize("way", WAYS)
def test_template_calls_are_told_once(way: str, spans: list[str]) -> None:
    model, debug, _ = watched()
    with told() as seen:
        parts = Parts.of(["Here.", "There."])
        ask(model, "predict", way, BARE, context_str=parts, query_str="Where?")
    for name in ("LLMPredictStartEvent", "LLMChatStartEvent", "LLMChatEndEvent"):
        assert len(seen.named(name)) == 1
    names = [NAMES[verb][WAYS.index(way)] for verb in ("predict", "chat")]
    assert spans == [f"RagWindowsLLM.{name}" for name in names]
    assert len(debug.get_llm_inputs_outputs()) == 1
    assert len(debug.get_event_pairs(CBEventType.TEMPLATING)) == 1


@pytest.mark.usefixtures("alone_or_not")
@EACH
def test_an_error_of_the_worker_surfaces_at_once_and_is_told_once(verb: str, way: str) -> None:
    for error, kind in ((None, RuntimeError), (ValueError("the worker broke"), GenerationError)):
        pace = Pace(fails_at=2, error=error)
        model, debug, _ = watched(pace)
        started = time.process_time()
        with told() as seen, pytest.raises(kind, match="the worker broke"):
            ask(model, verb, way, question(verb, "Where?"))
        assert time.process_time() - started < 1
        assert pace.tokens == 2
        ((_, end),) = debug.get_llm_inputs_outputs()
        assert isinstance((end.payload or {})[EventPayload.EXCEPTION], kind)
        assert not seen.named("LLMChatEndEvent", "LLMCompletionEndEvent")


@pytest.mark.parametrize("verb", ["chat", "complete"])
def test_a_handler_that_keeps_everything_keeps_no_stream_running(verb: str) -> None:
    """Its events hold the exception that ended the stream, and that one the stream's frames."""

    async def leave(pace: Pace) -> None:
        stream = await getattr(slow(pace), NAMES[verb][3])(question(verb, "Where?"))
        await anext(stream)
        await stream.aclose()

    with told() as seen:
        pace = Pace(0.01)
        stream = getattr(slow(pace), NAMES[verb][2])(question(verb, "Where?"))
        next(stream)
        stream.close()
        assert pace.settle() == 0
        assert len(seen.named("ExceptionEvent")) == 1
        pace = Pace(0.01)
        asyncio.run(leave(pace))
        assert pace.settle() <= 1
        assert len(seen.named("ExceptionEvent")) == 2
