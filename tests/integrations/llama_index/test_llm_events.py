"""Callbacks and instrumentation events: each once, whatever the endpoint."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator
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
from llama_index.core.prompts import PromptTemplate
from llama_index_instrumentation import get_dispatcher
from llama_index_instrumentation.base import BaseEvent
from llama_index_instrumentation.event_handlers import BaseEventHandler
from llama_index_instrumentation.span import SimpleSpan
from llama_index_instrumentation.span_handlers import SimpleSpanHandler

from llama_index.llms.rag_windows import Parts, RagWindowsLLM
from tests.integrations.llama_index.cases import reader
from tests.integrations.llama_index.endpoints import ENDPOINTS, user
from tests.integrations.llama_index.slow import Pace

TEMPLATE = PromptTemplate("{context_str}\n{query_str}")


class Kept(BaseEventHandler):
    """Keeps every event, exceptions with their tracebacks included."""

    _events: list[BaseEvent] = PrivateAttr(default_factory=list)

    def handle(self, event: BaseEvent, **kwargs: Any) -> None:
        self._events.append(event)

    def counts(self) -> Counter[str]:
        return Counter(type(event).__name__ for event in self._events)


class Spans(SimpleSpanHandler):
    """Keeps the names of the spans that were entered."""

    _names: list[str] = PrivateAttr(default_factory=list)

    def new_span(
        self, id_: str, bound_args: BoundArguments, *arguments: Any, **options: Any
    ) -> SimpleSpan:
        self._names.append(id_.partition("-")[0])
        return super().new_span(id_, bound_args, *arguments, **options)


@pytest.fixture
def kept() -> Iterator[Kept]:
    handler, root = Kept(), get_dispatcher()
    before = list(root.event_handlers)
    root.add_event_handler(handler)
    yield handler
    root.event_handlers = before


@pytest.fixture
def spans() -> Iterator[list[str]]:
    handler, root = Spans(), get_dispatcher()
    before = list(root.span_handlers)
    root.add_span_handler(handler)
    yield handler._names
    root.span_handlers = before


def watched(**options: Any) -> tuple[RagWindowsLLM, LlamaDebugHandler, TokenCountingHandler]:
    debug = LlamaDebugHandler(print_trace_on_end=False)
    tokens = TokenCountingHandler()
    manager = CallbackManager([debug, tokens])
    return RagWindowsLLM(lm=reader(), callback_manager=manager, **options), debug, tokens


@pytest.mark.parametrize("name", ENDPOINTS)
def test_each_call_is_told_once(name: str, kept: Kept, spans: list[str]) -> None:
    model, debug, tokens = watched(max_new_tokens=5, generate_kwargs={"min_new_tokens": 5})
    responses = ENDPOINTS[name](model, "Where?", passages=["Here.", "There."])
    kind = "Completion" if "complete" in name else "Chat"
    expected = {f"LLM{kind}StartEvent": 1, f"LLM{kind}EndEvent": 1}
    if "stream" in name:
        expected[f"LLM{kind}InProgressEvent"] = len(responses)
    assert kept.counts() == expected
    assert spans == [f"RagWindowsLLM.{name}"]
    ((start, end),) = debug.get_llm_inputs_outputs()
    assert EventPayload.SERIALIZED in (start.payload or {})
    said = EventPayload.COMPLETION if kind == "Completion" else EventPayload.RESPONSE
    assert (end.payload or {})[said] is responses[-1]
    assert tokens.completion_llm_token_count == responses[-1].raw["usage"]["completion_tokens"] == 5
    assert tokens.prompt_llm_token_count == responses[-1].raw["usage"]["prompt_tokens"]


@pytest.mark.parametrize("name", ["predict", "stream", "apredict", "astream"])
def test_template_calls_are_told_once(name: str, kept: Kept, spans: list[str]) -> None:
    model, debug, _ = watched(max_new_tokens=5)
    arguments = {"context_str": Parts.of(["Here.", "There."]), "query_str": "Where?"}

    async def awaited() -> None:
        result = await getattr(model, name)(TEMPLATE, **arguments)
        if name == "astream":
            async for _ in result:
                pass

    if name.startswith("a"):
        asyncio.run(awaited())
    else:
        list(getattr(model, name)(TEMPLATE, **arguments))
    counts = kept.counts()
    assert counts["LLMPredictStartEvent"] == counts["LLMChatStartEvent"] == 1
    assert counts["LLMChatEndEvent"] == 1
    chat = {"predict": "chat", "stream": "stream_chat", "apredict": "achat"}.get(name)
    assert spans == [f"RagWindowsLLM.{name}", f"RagWindowsLLM.{chat or 'astream_chat'}"]
    assert len(debug.get_llm_inputs_outputs()) == 1
    assert len(debug.get_event_pairs(CBEventType.TEMPLATING)) == 1


@pytest.mark.parametrize("name", ENDPOINTS)
def test_a_failed_call_is_told_once(name: str, kept: Kept) -> None:
    pace = Pace(0.0, fails_at=1)
    model, debug, _ = watched(generate_kwargs={"logits_processor": [pace]})
    with pytest.raises(RuntimeError, match="the worker broke"):
        ENDPOINTS[name](model, "Where?")
    ((_, end),) = debug.get_llm_inputs_outputs()
    assert isinstance((end.payload or {})[EventPayload.EXCEPTION], RuntimeError)
    assert not any(event.endswith("EndEvent") for event in kept.counts())


@pytest.mark.parametrize("name", ["stream_chat", "stream_complete"])
def test_a_handler_that_keeps_everything_keeps_no_stream_running(name: str, kept: Kept) -> None:
    """Its events hold the exception that ended the stream, and that one the stream's frames."""
    pace = Pace(0.02)
    model, _, _ = watched(max_new_tokens=400, generate_kwargs={"logits_processor": [pace]})
    stream = getattr(model, name)(user("Where?") if "chat" in name else "Where?")
    next(stream)
    stream.close()
    assert kept.counts()["ExceptionEvent"] == 1
    tokens = pace.tokens
    time.sleep(0.2)
    assert pace.tokens == tokens


@pytest.mark.parametrize("name", ["astream_chat", "astream_complete"])
def test_nor_an_asynchronous_one(name: str, kept: Kept) -> None:
    pace = Pace(0.02)
    model, _, _ = watched(max_new_tokens=400, generate_kwargs={"logits_processor": [pace]})

    async def leave() -> None:
        stream = await getattr(model, name)(user("Where?") if "chat" in name else "Where?")
        await anext(stream)
        await stream.aclose()
        before = pace.tokens
        await asyncio.sleep(0.2)
        assert pace.tokens - before <= 1

    asyncio.run(leave())
    assert kept.counts()["ExceptionEvent"] == 1
