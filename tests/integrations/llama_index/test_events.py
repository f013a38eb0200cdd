"""Callbacks and instrumentation events: each once, whatever the endpoint."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest
from llama_index.core.callbacks import (
    CallbackManager,
    EventPayload,
    LlamaDebugHandler,
    TokenCountingHandler,
)

from llama_index.llms.rag_windows import RagWindowsLLM
from tests.integrations.cases import LONG, Pace, reader
from tests.integrations.llama_index.asking import (
    ENDPOINTS,
    NAMES,
    ask,
    question,
    told,
)

EACH = pytest.mark.parametrize(("verb", "way"), ENDPOINTS)


def watched(*paces: Pace) -> tuple[RagWindowsLLM, LlamaDebugHandler, TokenCountingHandler]:
    debug, tokens = LlamaDebugHandler(print_trace_on_end=False), TokenCountingHandler()
    manager = CallbackManager([debug, tokens])
    given = {"min_new_tokens": 5, "logits_processor": list(paces)}
    options: dict[str, Any] = {"max_new_tokens": 5, "generate_kwargs": given}
    return RagWindowsLLM(lm=reader(), callback_manager=manager, **options), debug, tokens


@EACH
def test_each_call_is_told_once(verb: str, way: str) -> None:
    model, debug, tokens = watched()
    texts = ["Here.", "There."]
    with told() as seen:
        _, _, pieces = ask(model, verb, way, question(verb, "Where?"), passages=texts)
    kind = "Completion" if verb == "complete" else "Chat"
    expected = {f"LLM{kind}StartEvent": 1, f"LLM{kind}EndEvent": 1}
    if "stream" in way:
        expected[f"LLM{kind}InProgressEvent"] = len(pieces)
    assert Counter(type(event).__name__ for event in seen.events) == expected
    ((start, end),) = debug.get_llm_inputs_outputs()
    assert EventPayload.SERIALIZED in (start.payload or {})
    said = EventPayload.COMPLETION if verb == "complete" else EventPayload.RESPONSE
    assert (end.payload or {})[said] is pieces[-1]
    usage = pieces[-1].raw["usage"]
    assert tokens.completion_llm_token_count == usage["completion_tokens"] == 5
    assert tokens.prompt_llm_token_count == usage["prompt_tokens"]


@EACH
def test_a_failed_call_is_told_once(verb: str, way: str) -> None:
    model, debug, _ = watched(Pace(fails_at=2))
    with told() as seen, pytest.raises(RuntimeError, match="the worker broke"):
        ask(model, verb, way, question(verb, "Where?"))
    ((_, end),) = debug.get_llm_inputs_outputs()
    assert isinstance((end.payload or {})[EventPayload.EXCEPTION], RuntimeError)
    assert not seen.named("LLMChatEndEvent", "LLMCompletionEndEvent")


@pytest.mark.parametrize("verb", ["chat", "complete"])
def test_a_handler_that_keeps_everything_keeps_no_stream_running(verb: str) -> None:
    """Its events hold the exception that ended the stream, and that one the stream's frames."""

    def slow(pace: Pace) -> RagWindowsLLM:
        given = {**LONG, "logits_processor": [pace]}
        return RagWindowsLLM(lm=reader(), generate_kwargs=given)

    async def leave(pace: Pace) -> None:
        stream = await getattr(slow(pace), NAMES[verb][3])(question(verb, "Where?"))
        await anext(stream)
        await stream.aclose()

    with told() as seen:
        pace = Pace(0.01)
        stream = getattr(slow(pace), NAMES[verb][2])(question(verb, "Where?"))
        next(stream)
        stream.close()
        assert pace.settle() <= 1
        assert len(seen.named("ExceptionEvent")) == 1
        pace = Pace(0.01)
        asyncio.run(leave(pace))
        assert pace.settle() <= 1
        assert len(seen.named("ExceptionEvent")) == 2
