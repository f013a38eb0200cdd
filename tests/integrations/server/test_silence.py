"""Streams in which nothing is said for long: a status at once, comments, errors as events."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest
from fastapi import FastAPI

from rag_windows import PassageCache, WindowedLM
from rag_windows_server import Settings, create_app
from tests.integrations.server.test_chat import DOCUMENTS, body
from tests.integrations.server.test_load import until

Listen = Callable[[FastAPI], str]
CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"


def asked(path: str, **fields: Any) -> dict[str, Any]:
    """A request for a stream."""
    given = {**body(stream=True, documents=DOCUMENTS), **fields}
    if path == RESPONSES:
        given["input"] = given.pop("messages")[0]["content"]
    return given


class Gate:
    """Holds forward passes up until it is opened, or lets them fail.

    Attributes:
        waiting: whether one is held up.
    """

    def __init__(self) -> None:
        self._open, self.waiting = threading.Event(), threading.Event()
        self.passes, self.error = 0, False

    def __call__(self, *_: object) -> None:
        self.passes += 1
        self.waiting.set()
        assert self._open.wait(60)
        if self.error:
            raise RuntimeError("a text of somebody")

    def open(self) -> None:
        self._open.set()


@pytest.fixture
def gate(lm: WindowedLM) -> Iterator[Gate]:
    made = Gate()
    hook = lm.model.get_input_embeddings().register_forward_pre_hook(made)
    yield made
    hook.remove()
    made.open()


@pytest.fixture
def cold(lm: WindowedLM) -> WindowedLM:
    """The model without a window of these documents."""
    return lm.with_cache(PassageCache("64MiB"))


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
@pytest.mark.parametrize("fields", [{}, {"n": 2}, {"method": "sequential"}], ids=str)
def test_the_status_comes_before_any_pass_of_the_model(
    listening: Listen, cold: WindowedLM, gate: Gate, path: str, fields: dict[str, Any]
) -> None:
    if path == RESPONSES:
        fields = {name: value for name, value in fields.items() if name != "n"}
    address = listening(create_app(cold, Settings(ping_s=600)))
    with httpx.stream("POST", address + path, json=asked(path, **fields), timeout=30) as answer:
        assert answer.status_code == 200
        gate.open()
        assert '"cheese"' in "".join(answer.iter_text())


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
def test_comments_while_nothing_is_there(
    listening: Listen, cold: WindowedLM, gate: Gate, path: str
) -> None:
    address = listening(create_app(cold, Settings(ping_s=0.05)))
    with httpx.stream("POST", address + path, json=asked(path), timeout=30) as answer:
        lines = answer.iter_lines()
        comments = 0
        while comments < 3:
            comments += next(lines).startswith(": ping")
        gate.open()
        rest = [*lines]
    assert any('"cheese"' in line for line in rest)
    assert rest[-2:] == ["data: [DONE]", ""]


def test_clients_skip_comments(listening: Listen, cold: WindowedLM, gate: Gate) -> None:
    address = listening(create_app(cold, Settings(ping_s=0.05)))
    client = openai.OpenAI(base_url=f"{address}/v1", api_key="any", max_retries=0)
    threading.Timer(0.4, gate.open).start()
    said: Any = {"messages": body()["messages"], "extra_body": {"documents": DOCUMENTS}}
    chunks = [*client.chat.completions.create(model="tiny-reader", stream=True, **said)]
    assert "".join(one.choices[0].delta.content or "" for one in chunks) == "cheese"
    question = body()["messages"][0]["content"]
    events = [
        *client.responses.create(
            model="tiny-reader",
            input=question,
            stream=True,
            temperature=0,
            extra_body={"documents": DOCUMENTS},
        )
    ]
    assert events[-1].type == "response.completed"


def test_openai_raises_what_went_wrong_behind_the_status(
    listening: Listen, cold: WindowedLM, gate: Gate
) -> None:
    gate.error = True
    address = listening(create_app(cold, Settings(ping_s=0.05)))
    client = openai.OpenAI(base_url=f"{address}/v1", api_key="any", max_retries=0)
    documents: Any = {"extra_body": {"documents": DOCUMENTS}}
    messages: Any = body()["messages"]
    told = "The server failed to answer. Its log has the details under this request's id."
    chunks = client.chat.completions.create(
        model="tiny-reader", messages=messages, stream=True, **documents
    )
    threading.Timer(0.3, gate.open).start()
    with pytest.raises(openai.APIError) as raised:
        list(chunks)
    assert raised.value.message == told
    events = client.responses.create(model="tiny-reader", input="Who?", stream=True, **documents)
    with pytest.raises(openai.APIError) as raised:
        list(events)
    assert raised.value.message == told
    assert raised.value.code == "internal_error"


@pytest.mark.slow
@pytest.mark.parametrize("path", [CHAT, RESPONSES])
async def test_a_status_while_in_line(
    listening: Listen, cold: WindowedLM, gate: Gate, path: str
) -> None:
    app = create_app(cold, Settings(max_rows=1, ping_s=0.1, wait_s=1.0))
    line = app.state.served.answering.line
    async with httpx.AsyncClient(base_url=listening(app), timeout=30) as client:
        first = asyncio.create_task(client.post(path, json=asked(path)))
        await until(lambda: line.working == 1)
        async with client.stream("POST", path, json=asked(path)) as answer:
            assert answer.status_code == 200
            text = "".join([piece async for piece in answer.aiter_text()])
        gate.open()
        assert (await first).status_code == 200
    assert ": ping" in text
    (error,) = [one for one in text.split("\n\n") if '"unavailable"' in one]
    told = json.loads(error.partition("data: ")[2])
    assert told["error"]["message"].startswith("No turn came within 1 seconds.")
    assert error.startswith("event: error\n" if path == RESPONSES else "data: ")
    assert line.working == line.waiting == 0


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
def test_what_there_is_no_memory_for_has_its_status(
    listening: Listen, cold: WindowedLM, path: str
) -> None:
    address = listening(create_app(cold, Settings(max_bytes=10_000)))
    answer = httpx.post(address + path, json=asked(path), timeout=30)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
