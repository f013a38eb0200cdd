"""Chat completions over HTTP: documents in, citations out, each field honoured or refused."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from rag_windows import WindowedLM
from rag_windows_server import Keys, Settings, create_app
from tests.integrations.server.conftest import asking

QUESTION = "What does Zelwick Academy make?"
DOCUMENTS: list[Any] = [
    {"id": "z", "title": "Zelwick Academy", "text": "Zelwick Academy makes cheese."},
    "Sulava lies on the river Orn.",
]


def body(**fields: Any) -> dict[str, Any]:
    """A request."""
    messages = [{"role": "user", "content": QUESTION}]
    return {"model": "tiny-reader", "messages": messages, "temperature": 0, **fields}


async def ask(client: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    """An answer."""
    answer = await client.post("/v1/chat/completions", json=body(**fields))
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def events(client: httpx.AsyncClient, **fields: Any) -> list[dict[str, Any]]:
    """The events of a stream."""
    answer = await client.post("/v1/chat/completions", json=body(stream=True, **fields))
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    lines = [
        line.removeprefix("data: ")
        for line in answer.text.split("\n\n")
        if line[:1] not in ("", ":")
    ]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


async def test_answer_equals_generate(client: httpx.AsyncClient, lm: WindowedLM) -> None:
    answer = await ask(client, documents=DOCUMENTS)
    expected = lm.generate(QUESTION, [DOCUMENTS[0], DOCUMENTS[1]], do_sample=False)
    message = answer["choices"][0]["message"]
    assert message["content"] == expected.text == "cheese"
    weights = [one["weight"] for one in message["citations"]]
    assert expected.citations is not None
    assert weights == pytest.approx([one.mass for one in expected.citations], rel=1e-4)
    assert message["annotations"][0]["url_citation"]["url"] == "passage:z"
    assert answer["usage"]["prompt_tokens"] == expected.usage.prompt_tokens


async def test_passages_are_left_out(lm: WindowedLM) -> None:
    async with asking(create_app(lm)) as client:
        answer = await ask(client, documents=DOCUMENTS, citations="removal")
        (choice,) = answer["choices"]
        message = choice["message"]
        found = {one["id"]: one for one in message["citations"]}
        assert found["z"]["supports"] == "yes"
        assert found["z"]["drop"] > 2
        assert message["rag"]["supported"] is True
        (said,) = message["rag"]["statements"]
        (note,) = message["annotations"]
        place = note["url_citation"]
        assert (place["start_index"], place["end_index"]) == (said["start"], said["end"])
        assert message["content"][said["start"] : said["end"]] == said["text"]
        plain = await ask(client, documents=DOCUMENTS, citations=True)
        assert "drop" not in plain["choices"][0]["message"]["citations"][0]
        for fields, word in (
            ({"citations": "all"}, "must be True, False"),
            ({"citations": "removal", "method": "sequential"}, "'sequential' encodes each passage"),
        ):
            refused = await client.post("/v1/chat/completions", json=body(**fields))
            error = refused.json()["error"]
            assert (refused.status_code, error["param"]) == (400, "citations")
            assert word in error["message"]


async def test_an_operator_may_refuse_removal(lm: WindowedLM) -> None:
    settings = Settings(allow=frozenset({"method"}))
    async with asking(create_app(lm, settings)) as client:
        refused = await client.post("/v1/chat/completions", json=body(citations="removal"))
        assert refused.json()["error"]["param"] == "citations"
        assert "requests may not set it" in refused.json()["error"]["message"]


async def test_retrieves_by_itself(client: httpx.AsyncClient) -> None:
    answer = await ask(client, rag={"top_k": 2})
    citations = answer["choices"][0]["message"]["citations"]
    assert len(citations) == 2
    assert "makes cheese" in citations[0]["text"]
    assert not (await ask(client, rag={"top_k": 0}))["choices"][0]["message"]["citations"]


async def test_stream_equals_answer(client: httpx.AsyncClient) -> None:
    whole = (await ask(client, documents=DOCUMENTS))["choices"][0]
    parts = await events(client, documents=DOCUMENTS, stream_options={"include_usage": True})
    *chunks, last, counted = parts
    told = "".join(one["choices"][0]["delta"].get("content", "") for one in (*chunks, last))
    assert told == whole["message"]["content"]
    delta = last["choices"][0]["delta"]
    assert delta["annotations"] == whole["message"]["annotations"]
    assert [one["weight"] for one in delta["citations"]] == pytest.approx(
        [one["weight"] for one in whole["message"]["citations"]], rel=1e-4
    )
    assert counted["choices"] == []
    assert counted["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize("path", ["/health", "/ready", "/v1/models", "/metrics"])
async def test_other_routes(client: httpx.AsyncClient, path: str) -> None:
    assert (await client.get(path)).status_code == 200


async def test_keys(lm: WindowedLM) -> None:
    keys = Keys([("ada", "k" * 32, False), ("olga", "o" * 32, True)])
    transport = httpx.ASGITransport(create_app(lm, Settings(), keys=keys))
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        asked = body(documents=DOCUMENTS)
        statuses = []
        for key in (None, "x" * 32, "k" * 32):
            headers = {} if key is None else {"Authorization": f"Bearer {key}"}
            answer = await client.post("/v1/chat/completions", json=asked, headers=headers)
            statuses.append(answer.status_code)
        assert statuses == [401, 401, 200]
        for key, status in (("k" * 32, 403), ("o" * 32, 200)):
            headers = {"Authorization": f"Bearer {key}"}
            assert (await client.get("/metrics", headers=headers)).status_code == status
