"""Calls of tools, whole and streamed, with models whose answers are scripted."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from rag_windows_server import create_app
from tests.integrations.server.conftest import asking
from tests.tool_models import SEARCH, scripted

CALL = '<tool_call>\n{"name": "search", "arguments": {"query": "cheese", "k": 2}}\n</tool_call>'


def body(**fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "Who makes cheese?"}]
    return {"model": "tiny-reader", "messages": messages, "tools": [SEARCH], **fields}


def client(*answers: str) -> httpx.AsyncClient:
    return asking(create_app(scripted("hermes", *answers)))


async def test_calls_whole_and_streamed() -> None:
    async with client(f"Let me see.{CALL}", f"Let me see.{CALL}") as asked:
        whole = (await asked.post("/v1/chat/completions", json=body())).json()["choices"][0]
        streamed = await asked.post("/v1/chat/completions", json=body(stream=True))
    (call,) = whole["message"]["tool_calls"]
    assert whole["finish_reason"] == "tool_calls"
    assert whole["message"]["content"].strip() == "Let me see."
    assert call["type"] == "function"
    assert call["function"]["name"] == "search"
    assert json.loads(call["function"]["arguments"]) == {"query": "cheese", "k": 2}
    lines = [line.removeprefix("data: ") for line in streamed.text.split("\n\n") if line]
    chunks = [json.loads(line)["choices"][0] for line in lines[:-1]]
    text = "".join(one["delta"].get("content") or "" for one in chunks)
    assert text == whole["message"]["content"]
    assert chunks[-1]["finish_reason"] == "tool_calls"
    (delta,) = chunks[-1]["delta"]["tool_calls"]
    assert (delta["index"], delta["function"]) == (0, call["function"])


async def test_one_call_at_most() -> None:
    async with client(CALL + CALL, CALL + CALL) as asked:
        for fields, count in (({}, 2), ({"parallel_tool_calls": False}, 1)):
            answer = await asked.post("/v1/chat/completions", json=body(**fields))
            assert len(answer.json()["choices"][0]["message"]["tool_calls"]) == count


async def test_broken_calls_stay_text() -> None:
    async with client("<tool_call>\n{nothing\n</tool_call>") as asked:
        answer = (await asked.post("/v1/chat/completions", json=body())).json()["choices"][0]
    assert answer["finish_reason"] == "stop"
    assert "{nothing" in answer["message"]["content"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tools": [SEARCH, SEARCH]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "no name!"}}]}, "tools"),
        ({"messages": [{"role": "tool", "content": "x", "tool_call_id": "a"}]}, "messages"),
        ({"tool_choice": "any"}, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        (
            {"tools": [{"type": "function", "function": {**SEARCH["function"], "strict": True}}]},
            "tools[].function.strict",
        ),
    ],
)
async def test_what_cannot_be_kept(fields: dict[str, Any], param: str) -> None:
    async with client("x") as asked:
        answer = await asked.post("/v1/chat/completions", json=body(**fields))
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


async def test_tool_choice() -> None:
    lm = scripted("hermes", "no call", ' {"query": "cheese"}}', ' {"query": "cheese"}}')
    named = {"type": "function", "function": {"name": "search"}}
    allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "search"}}]}
    async with asking(create_app(lm)) as asked:
        for choice in ("none", named, {"type": "allowed_tools", "allowed_tools": allowed}):
            answer = await asked.post("/v1/chat/completions", json=body(tool_choice=choice))
            assert answer.status_code == 200, answer.text
            calls = answer.json()["choices"][0]["message"].get("tool_calls", [])
            assert [one["function"]["name"] for one in calls] == (
                [] if choice == "none" else ["search"]
            )
    assert [bool(query.tools) for query, _ in lm.asked] == [False, True, True]
    assert [bool(query.opening) for query, _ in lm.asked] == [False, True, True]
