"""Every field of chat completions is honoured or refused by name; none is ignored."""

from __future__ import annotations

import typing
from typing import Any

import httpx
import pytest
from openai.types.chat import completion_create_params as openai_types

from rag_windows import WindowedLM
from rag_windows_server import Settings, create_app
from rag_windows_server.chat import ChatBody
from tests.integrations.server.conftest import asking
from tests.integrations.server.test_chat import DOCUMENTS, ask, body, events
from tests.tool_models import scripted

SEARCH = {"type": "function", "function": {"name": "search", "parameters": {"type": "object"}}}

REFUSED: dict[str, Any] = {
    "audio": {"format": "mp3", "voice": "alloy"},
    "function_call": "auto",
    "functions": [{"name": "search"}],
    "metadata": {"a": "b"},
    "modalities": ["text", "audio"],
    "moderation": {"model": "omni"},
    "prediction": {"type": "content", "content": "x"},
    "prompt_cache_key": "k",
    "prompt_cache_options": {"mode": "implicit"},
    "prompt_cache_retention": "24h",
    "reasoning_effort": "low",
    "store": True,
    "verbosity": "low",
    "web_search_options": {},
}
"""A value that each of them could have."""

HONOURED = {
    *("frequency_penalty", "logit_bias", "logprobs", "max_completion_tokens", "max_tokens"),
    *("messages", "model", "n", "parallel_tool_calls", "presence_penalty", "response_format"),
    *("safety_identifier", "seed", "service_tier", "stop", "stream", "stream_options"),
    *("temperature", "tool_choice", "tools", "top_logprobs", "top_p", "user"),
}
OURS = {
    *("documents", "chat_template_kwargs", "rag", "method", "rag_temperature", "link_tokens"),
    "link_choose",
    "fallback",
    "citations",
}


def test_every_field_is_known() -> None:
    base = typing.get_type_hints(openai_types.CompletionCreateParamsBase)
    streamed = typing.get_type_hints(openai_types.CompletionCreateParamsStreaming)
    assert {*base, *streamed} == HONOURED | REFUSED.keys()
    assert ChatBody.model_fields.keys() == HONOURED | OURS
    assert ChatBody.refused.keys() == REFUSED.keys()


@pytest.mark.parametrize("name", [*REFUSED, "unheard_of"])
async def test_refused_by_name(client: httpx.AsyncClient, name: str) -> None:
    value = REFUSED.get(name, 1)
    answer = await client.post("/v1/chat/completions", json=body(**{name: value}))
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, name)
    assert error["type"] == "invalid_request_error"
    assert name in error["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": 1}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "Q", "x": 1}]}, "messages[0].x"),
        ({"messages": [{"role": "function", "content": "Q"}]}, "messages[0].role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0]",
        ),
        ({"messages": [{"role": "user", "content": "Q", "refusal": "R"}]}, "messages[0].refusal"),
        (
            {"messages": [{"role": "assistant", "content": "Q", "function_call": {}}]},
            "messages[0].function_call",
        ),
        ({"messages": [{"role": "user", "content": "Q", "name": "a b"}]}, "messages"),
        ({"messages": [{"role": "user", "content": "Q " * 9000}]}, "messages"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", ""]}, "stop"),
        ({"temperature": 3}, "temperature"),
        ({"temperature": "0"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 0}, "n"),
        ({"n": 99}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens"),
        ({"max_completion_tokens": 10**6}, "max_completion_tokens"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logit_bias": {"cheese": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"frequency_penalty": 3}, "frequency_penalty"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
        ({"service_tier": "priority"}, "service_tier"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"parallel_tool_calls": False}, "parallel_tool_calls"),
        ({"tools": [SEARCH]}, "tools"),
        ({"tools": [{"type": "custom"}]}, "tools[0]"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"rag": {"top_k": 10**6}}, "rag.top_k"),
        ({"rag": {"top_k": 1, "k": 1}}, "rag.k"),
        ({"rag": {"top_k": 1}, "documents": ["A."]}, "rag.top_k"),
        ({"method": "magic"}, "method"),
        ({"rag_temperature": 0}, "rag_temperature"),
        ({"method": "pcw", "rag_temperature": 0.5}, "method"),
        ({"link_tokens": "some"}, "link_tokens"),
        ({"link_tokens": 1, "link_choose": "middle"}, "link_choose"),
        ({"link_choose": "query"}, "link_choose"),
        ({"fallback": "none"}, "fallback"),
        (
            {"chat_template_kwargs": {"enable_thinking": True}},
            "chat_template_kwargs.enable_thinking",
        ),
    ],
)
async def test_values_are_checked(
    client: httpx.AsyncClient, fields: dict[str, Any], param: str
) -> None:
    answer = await client.post("/v1/chat/completions", json=body(**fields))
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


async def test_unknown_model(client: httpx.AsyncClient) -> None:
    answer = await client.post("/v1/chat/completions", json=body(model="gpt-5"))
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "model_not_found"


async def test_neutral_values_are_taken(client: httpx.AsyncClient) -> None:
    same: dict[str, Any] = {"store": False, "modalities": ["text"], "metadata": {}, "audio": None}
    answer = await ask(client, documents=DOCUMENTS, service_tier="auto", user="ada", **same)
    assert answer["service_tier"] == "default"


# What each honoured field does.


async def test_lengths_and_stops(client: httpx.AsyncClient) -> None:
    for name in ("max_tokens", "max_completion_tokens"):
        answer = await ask(client, documents=DOCUMENTS, **{name: 1})
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["usage"]["completion_tokens"] == 1
    for stop in ("ees", ["x", "ees"]):
        choice = (await ask(client, documents=DOCUMENTS, stop=stop))["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("ch", "stop")


async def test_seed_and_choices(client: httpx.AsyncClient, lm: WindowedLM) -> None:
    end = {str(lm.tokenizer.eos_token_id): -100}
    drawn: dict[str, Any] = {"temperature": 2, "max_tokens": 12, "logit_bias": end}
    one = await ask(client, **drawn, seed=7, n=3)
    texts = [choice["message"]["content"] for choice in one["choices"]]
    assert [choice["index"] for choice in one["choices"]] == [0, 1, 2]
    assert len(set(texts)) > 1
    again = [
        (await ask(client, **drawn, seed=7 + index))["choices"][0]["message"]["content"]
        for index in range(3)
    ]
    assert texts == again
    told = ["", "", ""]
    for event in await events(client, **drawn, seed=7, n=3):
        for choice in event["choices"]:
            told[choice["index"]] += choice["delta"].get("content", "")
    assert told == texts
    nucleus = await ask(client, **{**drawn, "top_p": 1e-6})
    greedy = await ask(client, **{**drawn, "temperature": 0})
    contents = [one["choices"][0]["message"]["content"] for one in (nucleus, greedy)]
    assert contents[0] == contents[1]


async def test_what_messages_hold() -> None:
    scripted_lm = scripted("hermes", "x")
    said = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "name": "ada", "content": [{"type": "text", "text": "Who?"}]},
        {"role": "assistant", "content": None, "refusal": "No.", "annotations": [], "rag": {}},
        {"role": "user", "content": "Please."},
    ]
    async with asking(create_app(scripted_lm)) as client:
        await ask(client, messages=said)
    ((query, _),) = scripted_lm.asked
    assert query.system == "Be brief."
    assert [(turn.role, turn.content, turn.name) for turn in query.turns] == [
        ("user", "Who?", "ada"),
        ("assistant", "No.", None),
        ("user", "Please.", None),
    ]


async def test_logprobs(client: httpx.AsyncClient, lm: WindowedLM) -> None:
    choice = (await ask(client, documents=DOCUMENTS, logprobs=True, top_logprobs=2))["choices"][0]
    expected = lm.generate(
        body()["messages"], DOCUMENTS, do_sample=False, logprobs=True, top_logprobs=2
    )
    assert expected.logprobs is not None
    content = choice["logprobs"]["content"]
    assert "".join(one["token"] for one in content).strip() == "cheese"
    for one, other in zip(content, expected.logprobs, strict=False):
        assert one["logprob"] == pytest.approx(other.logprob, abs=1e-3)
        assert len(one["top_logprobs"]) == 2
    streamed = await events(client, documents=DOCUMENTS, logprobs=True)
    assert [one["token"] for one in streamed[-1]["choices"][0]["logprobs"]["content"]] == [
        one["token"] for one in content
    ]


async def test_penalties_and_biases(client: httpx.AsyncClient, lm: WindowedLM) -> None:
    end = str(lm.tokenizer.eos_token_id)
    endless: dict[str, Any] = {"documents": DOCUMENTS, "logit_bias": {end: -100}, "max_tokens": 24}
    plain = await ask(client, **endless)
    assert plain["usage"]["completion_tokens"] == 24
    for name in ("frequency_penalty", "presence_penalty"):
        other = await ask(client, **endless, **{name: 2.0})
        neutral = await ask(client, **endless, **{name: 0.0})
        content = plain["choices"][0]["message"]["content"]
        assert other["choices"][0]["message"]["content"] != content
        assert neutral["choices"][0]["message"]["content"] == content
    ids = lm.tokenizer.encode("cheese", add_special_tokens=False)
    forced = await ask(client, documents=DOCUMENTS, logit_bias={str(ids[0]): -100})
    assert forced["choices"][0]["message"]["content"] != "cheese"


@pytest.mark.slow
async def test_response_format(client: httpx.AsyncClient) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": ["b"]}}, "required": ["a"]}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    choice = (await ask(client, documents=DOCUMENTS, response_format=form))["choices"][0]
    assert choice["message"]["content"] == '{"a": "b"}'
    text = await ask(client, documents=DOCUMENTS, response_format={"type": "text"})
    assert text["choices"][0]["message"]["content"] == "cheese"
    mode = {"type": "json_object"}
    choice = (await ask(client, documents=DOCUMENTS, response_format=mode))["choices"][0]
    assert choice["message"]["content"].startswith("{")


async def test_reading(client: httpx.AsyncClient) -> None:
    for fields, method in (
        ({}, {"name": "ape"}),
        ({"method": "sequential"}, {"name": "sequential"}),
        ({"method": "pcw"}, {"name": "pcw"}),
        ({"rag_temperature": 0.5}, {"name": "ape", "temperature": 0.5}),
        ({"link_tokens": 4}, {"name": "linked"}),
        ({"link_tokens": 4, "link_choose": "query"}, {"name": "linked", "choose": "query"}),
    ):
        record = (await ask(client, documents=DOCUMENTS, **fields))["choices"][0]["message"]["rag"]
        told = record["method"]
        assert {name: told[name] for name in method} == method or told["name"].endswith("linked")
    guarded = await ask(client, documents=DOCUMENTS, fallback="sequential")
    assert guarded["choices"][0]["message"]["rag"]["fallback"]["taken"] is True


async def test_what_the_operator_allows(lm: WindowedLM) -> None:
    allowed = Settings(allow=frozenset(["method"]))
    async with asking(create_app(lm, allowed)) as client:
        assert await ask(client, documents=DOCUMENTS, method="pcw")
        for fields in (
            {"rag_temperature": 0.5},
            {"link_tokens": 1, "link_choose": "query"},
            {"fallback": "sequential"},
        ):
            answer = await client.post("/v1/chat/completions", json=body(**fields))
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == next(iter(fields))
