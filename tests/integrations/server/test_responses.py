"""Responses over HTTP: items in and out, streams, each field honoured or refused, real clients."""

from __future__ import annotations

import base64
import json
import typing
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import openai
import pytest
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI
from openai.types.responses import Response
from openai.types.responses import response_create_params as openai_types
from pydantic import SecretStr

from rag_windows import CancelledGenerationError, WindowedLM
from rag_windows_server import create_app
from rag_windows_server.answering import StreamPiece
from rag_windows_server.responses import ResponsesBody
from tests.integrations.server.conftest import asking
from tests.integrations.server.test_chat import DOCUMENTS, QUESTION
from tests.tool_models import scripted

SEARCH: dict[str, Any] = {
    "type": "function",
    "name": "search",
    "description": "Look things up.",
    "parameters": {
        "type": "object",
        "properties": {"query": {"type": "string"}},
        "required": ["query"],
    },
}
CALL = '<tool_call>\n{"name": "search", "arguments": {"query": "wall"}}\n</tool_call>'


def body(**fields: Any) -> dict[str, Any]:
    """A request."""
    return {"model": "tiny-reader", "input": QUESTION, "temperature": 0, **fields}


async def respond(client: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    """An answer, which has the type that openai's library gives it."""
    answer = await client.post("/v1/responses", json=body(**fields))
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    read = Response.model_construct(**found)
    assert read.id.startswith("resp_")
    return found


async def events(client: httpx.AsyncClient, **fields: Any) -> list[dict[str, Any]]:
    """The events of a stream, which are numbered and named."""
    answer = await client.post("/v1/responses", json=body(stream=True, **fields))
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    *lines, last = [one for one in answer.text.split("\n\n") if one]
    assert last == "data: [DONE]"
    told = []
    for line in lines:
        name, data = line.split("\n")
        told.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {told[-1]['type']}"
    assert [one["sequence_number"] for one in told] == list(range(len(told)))
    items = told[-1]["response"]["output"]
    for one in told:
        if "output_index" in one:
            item_id = one["item"]["id"] if "item" in one else one["item_id"]
            assert items[one["output_index"]]["id"] == item_id
    return told


def text_of(answer: dict[str, Any]) -> str:
    """What an answer says."""
    parts = [part for item in answer["output"] for part in item.get("content", ())]
    return "".join(part["text"] for part in parts if part["type"] == "output_text")


def timeless(value: Any) -> Any:
    """An answer without what differs from one request to the next; weights are rounded."""
    own = {"id", "item_id", "created_at", "completed_at", "rag", "usage"}
    if isinstance(value, dict):
        return {name: timeless(one) for name, one in value.items() if name not in own}
    if isinstance(value, list):
        return [timeless(one) for one in value]
    return round(value, 4) if isinstance(value, float) else value


# Fields.

REFUSED: dict[str, Any] = {
    "background": True,
    "context_management": [{"type": "compaction"}],
    "conversation": "conv_1",
    "max_tool_calls": 1,
    "moderation": {"model": "omni-moderation-latest"},
    "previous_response_id": "resp_1",
    "prompt": {"id": "pmpt_1"},
    "prompt_cache_key": "k",
    "prompt_cache_options": {"mode": "implicit"},
    "prompt_cache_retention": "24h",
    "reasoning": {"effort": "low"},
    "store": True,
    "truncation": "auto",
}
"""A value that each of them could have."""

HONOURED = {
    *("include", "input", "instructions", "max_output_tokens", "metadata", "model"),
    *("parallel_tool_calls", "safety_identifier", "service_tier", "stream", "stream_options"),
    *("temperature", "text", "tool_choice", "tools", "top_logprobs", "top_p", "user"),
}
OURS = {
    *("documents", "chat_template_kwargs", "rag", "method", "rag_temperature", "link_tokens"),
    "link_choose",
    *("fallback", "citations", "frequency_penalty", "presence_penalty"),
}
"""Beside OpenAI's; the penalties are Open Responses' own."""


def test_every_field_is_known() -> None:
    base = typing.get_type_hints(openai_types.ResponseCreateParamsBase)
    streamed = typing.get_type_hints(openai_types.ResponseCreateParamsStreaming)
    assert {*base, *streamed} == HONOURED | REFUSED.keys()
    assert ResponsesBody.model_fields.keys() == HONOURED | OURS
    assert ResponsesBody.refused.keys() == REFUSED.keys()


@pytest.mark.parametrize("name", [*REFUSED, "unheard_of", "stop", "seed", "n"])
async def test_refused_by_name(client: httpx.AsyncClient, name: str) -> None:
    answer = await client.post("/v1/responses", json=body(**{name: REFUSED.get(name, 1)}))
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, name)
    assert error["type"] == "invalid_request_error"
    assert name in error["message"]


def user(*parts: Any) -> dict[str, Any]:
    """An input of one message with these parts."""
    return {"input": [{"role": "user", "content": list(parts)}]}


def output(value: Any) -> dict[str, Any]:
    """An input with this output of a function."""
    item = {"type": "function_call_output", "call_id": "c", "output": value}
    return {"input": [{"role": "user", "content": QUESTION}, item]}


IMAGE = {"type": "input_image", "image_url": "https://example.org/a.png", "detail": "auto"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": 1}, "input"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "tool", "content": "Q"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": "Q", "x": 1}]}, "input[0].x"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].type"),
        (
            {"input": [{"type": "reasoning", "encrypted_content": "x"}]},
            "input[0].encrypted_content",
        ),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f"}]}, "input[0].arguments"),
        ({"instructions": "Be brief.", **user(IMAGE)}, "input[0].content[0]"),
        (
            user({"type": "input_file", "file_url": "file:///etc/passwd"}),
            "input[0].content[0].file",
        ),
        (
            user({"type": "input_text", "text": "Q", "prompt_cache_breakpoint": {}}),
            "input[0].content[0].prompt_cache_breakpoint",
        ),
        (output(None), "input[1].output"),
        ({"include": ["file_search_call.results"]}, "include[0]"),
        ({"instructions": ["Be brief."]}, "instructions"),
        ({"max_output_tokens": 10**6}, "max_output_tokens"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"metadata": {str(index): "" for index in range(17)}}, "metadata"),
        ({"stream_options": {"include_obfuscation": False}}, "stream_options"),
        (
            {"stream": True, "stream_options": {"include_obfuscation": True}},
            "stream_options.include_obfuscation",
        ),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"text": {"x": 1}}, "text.x"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"tools": [{**SEARCH, "defer_loading": True}]}, "tools[0].defer_loading"),
        ({"tool_choice": {"type": "file_search"}}, "tool_choice"),
    ],
)
async def test_values_are_checked(
    client: httpx.AsyncClient, fields: dict[str, Any], param: str
) -> None:
    answer = await client.post("/v1/responses", json=body(**fields))
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


async def test_neutral_values_are_taken(client: httpx.AsyncClient) -> None:
    same: dict[str, Any] = {"store": False, "background": False, "truncation": "disabled"}
    same |= {"reasoning": None, "include": [], "text": {"format": {"type": "text"}}}
    answer = await respond(client, documents=DOCUMENTS, service_tier="auto", **same)
    assert text_of(answer) == "cheese"


# What each honoured field does.


async def test_answer_equals_generate(client: httpx.AsyncClient, lm: WindowedLM) -> None:
    answer = await respond(client, documents=DOCUMENTS)
    expected = lm.generate(QUESTION, DOCUMENTS, do_sample=False)
    assert text_of(answer) == expected.text == "cheese"
    assert expected.citations is not None
    assert [one["weight"] for one in answer["citations"]] == pytest.approx(
        [one.mass for one in expected.citations], rel=1e-4
    )
    (part,) = answer["output"][0]["content"]
    assert part["annotations"] == [
        {
            "type": "url_citation",
            "url": "passage:z",
            "title": "Zelwick Academy",
            "start_index": 0,
            "end_index": 6,
        }
    ]
    assert answer["rag"]["windows"] == 2
    usage = (await respond(client, documents=DOCUMENTS))["usage"]
    assert usage["input_tokens"] == expected.usage.prompt_tokens
    assert usage["output_tokens"] == expected.usage.completion_tokens
    assert usage["input_tokens_details"]["cached_tokens"] > 0


async def test_what_was_asked_is_told(client: httpx.AsyncClient) -> None:
    told: dict[str, Any] = {
        "instructions": "Be brief.",
        "max_output_tokens": 20,
        "metadata": {"case": "7"},
        "safety_identifier": "ada",
        "user": "eve",
        "frequency_penalty": 0.5,
        "presence_penalty": 0.25,
        "top_p": 0.5,
        "temperature": 0.75,
        "text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "object"}}},
    }
    answer = await respond(client, **told, rag={"top_k": 0}, service_tier="auto")
    assert {name: answer[name] for name in told} == told
    assert answer["service_tier"] == "default"
    assert answer["store"] is answer["background"] is False
    plain = await respond(client, temperature=None)
    assert (plain["temperature"], plain["top_p"]) == (0, 1), "the model's own: it is greedy"


def file_part(text: str) -> dict[str, Any]:
    """A file that comes along with its text."""
    data = base64.b64encode(text.encode()).decode()
    url = f"data:text/plain;base64,{data}"
    return {"type": "input_file", "filename": "z", "file_data": url}


ASK = {"type": "input_text", "text": QUESTION}
TEXT = "Zelwick Academy makes cheese."


@pytest.mark.parametrize(
    "fields",
    [
        user(file_part(TEXT), ASK),
        {
            "input": [
                {"role": "user", "content": QUESTION},
                {"type": "function_call", "call_id": "c", "name": "search", "arguments": "{}"},
                {
                    "type": "function_call_output",
                    "call_id": "c",
                    "output": "Found.",
                    "artifact": [{"page_content": TEXT}],
                },
            ]
        },
    ],
)
async def test_documents_in(client: httpx.AsyncClient, fields: dict[str, Any]) -> None:
    answer = await respond(client, **fields)
    assert text_of(answer) == "cheese"
    assert len(answer["citations"]) == 1


async def test_messages_and_instructions(client: httpx.AsyncClient, lm: WindowedLM) -> None:
    conversation = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": "cheese"},
        {"role": "user", "content": "Where does Sulava lie?"},
    ]
    expected = lm.generate(conversation, DOCUMENTS, do_sample=False)
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": QUESTION}]},
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "cheese", "annotations": []}],
        },
        {"type": "message", "role": "user", "content": "Where does Sulava lie?"},
    ]
    told = {"type": "message", "role": "developer", "content": "Be brief."}
    for fields in ({"instructions": "Be brief.", "input": items}, {"input": [told, *items]}):
        answer = await respond(client, documents=DOCUMENTS, **fields)
        assert text_of(answer) == expected.text
        assert answer["usage"]["input_tokens"] == expected.usage.prompt_tokens


async def test_an_answer_that_is_cut(client: httpx.AsyncClient) -> None:
    fields: dict[str, Any] = {"documents": DOCUMENTS, "max_output_tokens": 1}
    answer = await respond(client, **fields)
    assert answer["status"] == answer["output"][0]["status"] == "incomplete"
    assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
    assert answer["usage"]["output_tokens"] == 1
    last = (await events(client, **fields))[-1]
    assert last["type"] == "response.incomplete"
    assert timeless(last["response"]) == timeless(answer)


async def test_logprobs(client: httpx.AsyncClient) -> None:
    fields: dict[str, Any] = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    answer = await respond(client, documents=DOCUMENTS, **fields)
    noted = answer["output"][0]["content"][0]["logprobs"]
    assert "".join(one["token"] for one in noted).strip() == "cheese"
    assert {len(one["top_logprobs"]) for one in noted} == {2}
    streamed = await events(client, documents=DOCUMENTS, **fields)
    (done,) = [one for one in streamed if one["type"] == "response.output_text.done"]
    assert [one["token"] for one in done["logprobs"]] == [one["token"] for one in noted]


# Tools and reasoning, with a model whose answers are written beforehand.


async def test_tools() -> None:
    async with asking(create_app(scripted("hermes", CALL, "The wall is white."))) as client:
        question = {"role": "user", "content": "Which colour has the wall?"}
        fields: dict[str, Any] = {"tools": [{**SEARCH, "strict": None}], "tool_choice": "auto"}
        answer = await respond(client, input=[question], **fields)
        (call,) = answer["output"]
        assert (call["type"], call["name"]) == ("function_call", "search")
        assert json.loads(call["arguments"]) == {"query": "wall"}
        assert answer["status"] == call["status"] == "completed"
        assert answer["tools"] == [{**SEARCH, "strict": None}]
        result = {"type": "function_call_output", "call_id": call["call_id"]}
        result["output"] = [{"type": "input_text", "text": "The wall is white."}]
        again = await respond(client, input=[question, call, result], **fields)
        assert text_of(again) == "The wall is white."


async def test_what_the_model_sees_of_calls() -> None:
    lm = scripted("hermes", "White.")
    async with asking(create_app(lm)) as client:
        calls = [
            {
                "type": "function_call",
                "call_id": key,
                "name": "search",
                "arguments": '{"query":"x"}',
            }
            for key in ("one", "two")
        ]
        results = [
            {"type": "function_call_output", "call_id": key, "output": f"Result {key}."}
            for key in ("one", "two")
        ]
        thought = {"type": "reasoning", "id": "rs_1", "summary": [], "content": []}
        said = {"role": "assistant", "content": "I look it up."}
        items = [{"role": "user", "content": "Colour?"}, thought, said, *calls, *results]
        await respond(client, input=items, tools=[SEARCH], instructions="Be brief.")
    query: Any = lm.asked[0][0]
    assert query.system == "Be brief."
    shown = [(one.role, one.content, len(one.calls)) for one in query.turns]
    assert shown == [
        ("user", "Colour?", 0),
        ("assistant", "I look it up.", 2),
        ("tool", "Result one.", 0),
        ("tool", "Result two.", 0),
    ]
    assert [one.call_id for one in query.turns[2:]] == ["one", "two"]


async def test_choice_of_tools() -> None:
    app = create_app(scripted("hermes", f"{CALL}\n{CALL}", f"{CALL}\n{CALL}", "Hello.", CALL))
    async with asking(app) as client:
        tools = {"tools": [SEARCH]}
        assert len((await respond(client, **tools))["output"]) == 2
        alone = await respond(client, **tools, parallel_tool_calls=False)
        assert len(alone["output"]) == 1
        assert alone["parallel_tool_calls"] is False
        none = await respond(client, **tools, tool_choice="none")
        assert text_of(none) == "Hello."
        chosen = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function"}]}
        chosen["tools"] = [{"type": "function", "name": "search"}]
        allowed = await respond(client, **tools, tool_choice=chosen)
        assert allowed["output"][0]["type"] == "function_call"
        assert allowed["tool_choice"] == chosen
        strict = {"tools": [{**SEARCH, "strict": True}]}
        answer = await client.post("/v1/responses", json=body(**strict))
        assert answer.json()["error"]["param"] == "tools[].strict"


async def test_a_call_in_a_stream() -> None:
    app = create_app(scripted("hermes", f"I look.\n{CALL}", f"I look.\n{CALL}"))
    async with asking(app) as client:
        whole = await respond(client, tools=[SEARCH])
        told = await events(client, tools=[SEARCH])
    message, call = told[-1]["response"]["output"]
    assert (message["type"], call["type"]) == ("message", "function_call")
    parts = [one for one in told if one.get("item_id") == call["id"]]
    assert [one["type"].removeprefix("response.function_call_") for one in parts] == [
        "arguments.delta",
        "arguments.done",
    ]
    assert parts[0]["delta"] == parts[1]["arguments"] == call["arguments"]
    assert {one["output_index"] for one in parts} == {1}
    assert whole["output"][0]["content"][0]["text"].strip() == "I look."
    deltas = [one["delta"] for one in told if one["type"] == "response.output_text.delta"]
    assert "".join(deltas) == message["content"][0]["text"]
    assert len(deltas) > 1


async def test_reasoning() -> None:
    script = "Two and three.</think>Five."
    app = create_app(scripted("thinking", script, script))
    async with asking(app) as client:
        whole = await respond(client, tools=[SEARCH])
        told = await events(client, tools=[SEARCH])
    thought, message = whole["output"]
    assert thought["type"] == "reasoning"
    assert thought["content"] == [{"type": "reasoning_text", "text": "Two and three."}]
    assert message["content"][0]["text"] == "Five."
    assert whole["usage"]["output_tokens_details"]["reasoning_tokens"] == len(
        "Two and three.</think>"
    )
    streamed = told[-1]["response"]["output"]
    assert [one["type"] for one in streamed] == ["reasoning", "message"]
    deltas = [one for one in told if one["type"] == "response.reasoning_text.delta"]
    assert "".join(delta["delta"] for delta in deltas) == "Two and three."
    (delta, *_) = deltas
    assert len(deltas) > 1
    assert streamed[delta["output_index"]]["id"] == delta["item_id"]


# Streams.


async def test_events_of_a_stream(client: httpx.AsyncClient) -> None:
    whole = await respond(client, documents=DOCUMENTS)
    told = await events(client, documents=DOCUMENTS, stream_options={"include_obfuscation": False})
    kinds = [one["type"].removeprefix("response.") for one in told]
    first, last = kinds.index("output_text.delta"), kinds.index("output_text.annotation.added")
    assert kinds[:first] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert set(kinds[first:last]) == {"output_text.delta"}
    assert kinds[last:] == [
        "output_text.annotation.added",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert timeless(told[-1]["response"]) == timeless(whole)
    assert told[0]["response"]["status"] == "in_progress"
    assert "".join(one["delta"] for one in told[first:last]) == text_of(whole)
    part = whole["output"][0]["content"][0]
    assert [told[last]["annotation"]] == part["annotations"]
    assert told[-2]["item"] == told[-1]["response"]["output"][0]
    assert {one["id"] for one in (told[0]["response"], told[-1]["response"])} == {
        told[1]["response"]["id"]
    }


@pytest.mark.parametrize(
    ("error", "code", "own"),
    [
        (CancelledGenerationError("Stopped."), "server_error", "unavailable"),
        (RuntimeError("a text of somebody"), "server_error", "internal_error"),
    ],
)
async def test_a_stream_that_fails(
    lm: WindowedLM, monkeypatch: pytest.MonkeyPatch, error: Exception, code: str, own: str
) -> None:
    app = create_app(lm)

    async def fails(*_: Any) -> AsyncGenerator[StreamPiece, None]:
        yield StreamPiece(0, "che")
        raise error

    monkeypatch.setattr(app.state.served.answering, "stream", fails)
    async with asking(app) as client:
        told = await events(client)
    *_, failure, last = told
    assert (failure["type"], failure["code"]) == ("error", own)
    assert last["type"] == "response.failed"
    assert last["response"]["status"] == "failed"
    assert last["response"]["error"] == {"code": code, "message": failure["message"]}
    assert text_of(last["response"]) == "che"
    assert "somebody" not in str(told)


# What Open Responses' compliance cases describe (openresponses.org/compliance).

REQUIRED = {
    *("id", "object", "created_at", "completed_at", "status", "incomplete_details", "model"),
    *("previous_response_id", "instructions", "output", "error", "tools", "tool_choice"),
    *("truncation", "parallel_tool_calls", "text", "top_p", "presence_penalty"),
    *("frequency_penalty", "top_logprobs", "temperature", "reasoning", "user", "usage"),
    *("max_output_tokens", "max_tool_calls", "store", "background", "service_tier", "metadata"),
    *("safety_identifier", "prompt_cache_key"),
}
NUMBERS = ("top_p", "presence_penalty", "frequency_penalty", "top_logprobs", "temperature")


def check_resource(answer: dict[str, Any], status: str = "completed") -> None:
    """The answer has all that the specification requires of a response, of its kind."""
    assert answer.keys() >= REQUIRED
    assert (answer["object"], answer["status"], answer["error"]) == ("response", status, None)
    assert all(isinstance(answer[name], int | float) for name in NUMBERS)
    assert isinstance(answer["created_at"], int)
    assert answer["truncation"] in ("auto", "disabled")
    assert answer["text"]["format"]["type"] == "text"
    assert isinstance(answer["metadata"], dict)
    if status == "in_progress":
        return
    assert isinstance(answer["completed_at"], int)
    usage = answer["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert isinstance(usage["input_tokens_details"]["cached_tokens"], int)
    assert isinstance(usage["output_tokens_details"]["reasoning_tokens"], int)
    assert answer["output"]
    for item in answer["output"]:
        assert item["id"]
        assert item["status"] == "completed"
        for part in item.get("content", ()):
            assert part.keys() >= {"type", "text", "annotations", "logprobs"}


MINIMAL = {"model": "tiny-reader"}
SAY = {"type": "message", "role": "user", "content": "Say hello in exactly three words."}


async def post(client: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    """An answer to a request with nothing but these fields."""
    answer = await client.post("/v1/responses", json={**MINIMAL, **fields})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def test_compliance_basic_text(client: httpx.AsyncClient) -> None:
    answer = await post(client, input=[SAY])
    check_resource(answer)
    assert answer["output"][0]["role"] == "assistant"


async def test_compliance_streaming(client: httpx.AsyncClient) -> None:
    told = await events(client, input=[SAY])
    check_resource(told[0]["response"], "in_progress")
    assert told[-1]["type"] == "response.completed"
    check_resource(told[-1]["response"])


# Clients.


def test_openai_python(address: str) -> None:
    with openai.OpenAI(base_url=f"{address}/v1", api_key="-", max_retries=0) as client:
        fields: Any = {"model": "tiny-reader", "input": QUESTION, "temperature": 0}
        extra = {"documents": DOCUMENTS}
        answer = client.responses.create(**fields, extra_body=extra)
        assert answer.output_text == "cheese"
        message: Any = answer.output[0]
        (cited,) = message.content[0].annotations
        assert (cited.type, cited.url, cited.end_index) == ("url_citation", "passage:z", 6)
        own: Any = answer.model_extra
        assert [one["id"] for one in own["citations"]] == ["z", None]
        assert answer.usage is not None
        with client.responses.create(**fields, extra_body=extra, stream=True) as stream:
            told = list(stream)
        assert isinstance(told[-1], openai.types.responses.ResponseCompletedEvent)
        assert told[-1].response.output_text == "cheese"
        added: Any = [one for one in told if one.type == "response.output_text.annotation.added"]
        assert added[0].annotation["url"] == "passage:z"
        with client.responses.stream(**fields, extra_body=extra) as helped:
            assert helped.get_final_response().output_text == "cheese"
        with pytest.raises(openai.BadRequestError) as refused:
            client.responses.create(**fields, previous_response_id="resp_1")
        assert (refused.value.param, refused.value.code) == (
            "previous_response_id",
            "unsupported_parameter",
        )
        with pytest.raises(openai.NotFoundError):
            client.responses.create(**{**fields, "model": "gpt-5"})


def langchain(address: str, **fields: Any) -> ChatOpenAI:
    """LangChain's model for this route."""
    return ChatOpenAI(
        base_url=f"{address}/v1",
        api_key=SecretStr("-"),
        model="tiny-reader",
        use_responses_api=True,
        temperature=0,
        max_retries=0,
        # Else LangChain keeps a client for each address, with connections of loops that have ended.
        http_async_client=httpx.AsyncClient(timeout=60),
        **fields,
    )


def cited_by(message: AIMessage) -> list[Any]:
    """Those of all blocks of a message."""
    blocks = [block for block in message.content if isinstance(block, dict)]
    return [one for block in blocks for one in block.get("annotations", ())]


async def test_langchain_keeps_annotations(address: str) -> None:
    llm = langchain(address, extra_body={"documents": DOCUMENTS})
    whole = llm.invoke(QUESTION)
    assert isinstance(whole, AIMessage)
    assert whole.text == "cheese"
    (cited,) = cited_by(whole)
    assert (cited["type"], cited["url"]) == ("url_citation", "passage:z")
    assert whole.usage_metadata is not None
    assert whole.usage_metadata["output_tokens"] == 2
    (block,) = whole.content_blocks
    standard: Any = block
    assert standard["annotations"][0]["type"] == "citation"
    streamed: Any = None
    for chunk in llm.stream(QUESTION):
        assert isinstance(chunk, AIMessageChunk)
        streamed = chunk if streamed is None else streamed + chunk
    assert streamed.text == "cheese"
    (again,) = cited_by(streamed)
    assert {name: again[name] for name in cited} == cited
    assert streamed.usage_metadata is not None
    message = await llm.ainvoke([HumanMessage(QUESTION), whole, HumanMessage(QUESTION)])
    assert message.text == "cheese"


def test_langchain_calls_tools(listening: Any) -> None:
    address = listening(create_app(scripted("hermes", CALL, CALL, "White.")))
    llm = langchain(address).bind_tools([SEARCH])
    question = HumanMessage("Which colour has the wall?")
    whole = llm.invoke([question])
    (call,) = whole.tool_calls
    assert (call["name"], call["args"]) == ("search", {"query": "wall"})
    streamed: Any = None
    for chunk in llm.stream([question]):
        streamed = chunk if streamed is None else streamed + chunk
    assert streamed.tool_calls[0]["args"] == {"query": "wall"}
    result = ToolMessage("The wall is white.", tool_call_id=str(call["id"]))
    assert llm.invoke([question, whole, result]).text == "White."
