"""A fleet of two readers answers as one server does, also while readers die and are replaced."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
import ray
from prometheus_client.parser import text_string_to_metric_families
from ray import serve

from rag_windows import Passage, WindowedLM
from rag_windows_server import Keys
from rag_windows_server.fleet.reader import Relayed
from rag_windows_server.fleet.routing import RoutedQuestion, passage_number
from tests.integrations.fleet.conftest import KEYS, NAME, Deploy
from tests.integrations.server.test_chat import DOCUMENTS, QUESTION, ask, body, events

pytestmark = pytest.mark.fleet

CHAT = "/v1/chat/completions"
END = {"2": -100}
"""With this bias an answer of the shipped model goes on."""


async def test_answers_are_those_of_one_model(client: httpx.AsyncClient) -> None:
    lm = WindowedLM.from_pretrained("tiny-reader", device_map="cpu")
    expected = lm.generate(QUESTION, DOCUMENTS, do_sample=False)
    assert expected.citations is not None
    weights = [one.mass for one in expected.citations]
    for answer in (await ask(client, documents=DOCUMENTS), await streamed(client)):
        message = answer["choices"][0]["message"]
        assert message["content"] == expected.text == "cheese"
        assert [one["weight"] for one in message["citations"]] == pytest.approx(weights, rel=1e-4)


async def streamed(client: httpx.AsyncClient) -> dict[str, Any]:
    told = await events(client, documents=DOCUMENTS)
    deltas = [one["choices"][0]["delta"] for one in told]
    content = "".join(one.get("content") or "" for one in deltas)
    return {"choices": [{"message": {"content": content, "citations": deltas[-1]["citations"]}}]}


async def test_retrieves_among_its_own_documents(client: httpx.AsyncClient) -> None:
    answer = await ask(client)
    message = answer["choices"][0]["message"]
    assert message["content"] == "cheese"
    assert len(message["citations"]) == 8


@pytest.mark.parametrize(
    ("request_", "status", "code"),
    [
        ({"json": body(documents=[{}])}, 400, "missing_required_parameter"),
        ({"json": {**body(), "model": "other"}}, 404, "model_not_found"),
        ({"content": b"{", "headers": {"Content-Type": "application/json"}}, 400, "invalid_json"),
        ({"content": b"{}", "headers": {"Content-Type": "text/plain"}}, 415, None),
        ({"json": body(), "headers": {"Authorization": "Bearer no"}}, 401, "invalid_api_key"),
    ],
)
async def test_refusals_are_the_servers(
    client: httpx.AsyncClient, request_: Any, status: int, code: str | None
) -> None:
    answer = await client.post(CHAT, **request_)
    assert answer.status_code == status
    assert code in (None, answer.json()["error"]["code"])
    assert len(answer.headers.get_list("x-request-id")) == 1
    assert answer.headers["x-reader"]


async def test_other_routes(client: httpx.AsyncClient) -> None:
    assert (await client.get("/ready")).json() == {"status": "ready"}
    assert (await client.get("/v1/models")).json()["data"][0]["id"] == "tiny-reader"
    assert "text/html" in (await client.get("/")).headers["content-type"]
    responded = await client.post(
        "/v1/responses", json={"model": "tiny-reader", "input": QUESTION, "documents": DOCUMENTS}
    )
    assert responded.status_code == 200, responded.text
    assert responded.json()["output"][0]["content"][0]["text"] == "cheese"
    missing = await client.get("/nowhere")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "not_found")


async def samples(client: httpx.AsyncClient, name: str) -> dict[str, float]:
    """The values of a metric by reader."""
    answer = await client.get("/metrics")
    if answer.status_code != 200:  # a reader that was just killed is not known to be dead yet
        return {}
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(answer.text):
        for one in family.samples:
            if one.name == name:
                reader = one.labels["replica"]
                found[reader] = found.get(reader, 0) + one.value
    return found


async def test_metrics_are_those_of_all_readers(client: httpx.AsyncClient) -> None:
    before = await samples(client, "rag_windows_answers_total")
    for _ in range(4):
        await ask(client, documents=DOCUMENTS)
    after = await samples(client, "rag_windows_answers_total")
    assert sum(after.values()) - sum(before.values()) == 4
    rows = await samples(client, "rag_windows_batch_rows")
    assert len(rows) == 2
    text = (await client.get("/metrics")).text
    assert text.count("# TYPE rag_windows_batch_rows gauge") == 1
    other = await client.get("/metrics", headers={"Authorization": f"Bearer {KEYS['bert']}"})
    assert other.status_code == 403


async def test_questions_go_where_their_passages_are(client: httpx.AsyncClient) -> None:
    readers: dict[str, str] = {}
    for number in range(16):
        document = f"Page {number}. Zelwick Academy makes cheese."
        for again in range(4):
            said = [{"role": "user", "content": f"{number}.{again}: {QUESTION}"}]
            asked = body(documents=[document], messages=said, max_tokens=1)
            answer = await client.post(CHAT, json=asked)
            usage = answer.json()["choices"][0]["message"]["rag"]
            assert usage["cached_windows"] == min(1, again)
            assert (
                readers.setdefault(document, answer.headers["x-reader"])
                == (answer.headers["x-reader"])
            )
    assert len({*readers.values()}) == 2
    # A router of another process knows only what the readers publish.
    handle: Any = serve.get_deployment_handle("Reader", NAME)
    reader = handle.options(method_name="answer", stream=True)
    tenant = Keys([("anna", KEYS["anna"], True)]).tenant(client.headers["authorization"])
    scope = {"type": "http", "method": "GET", "path": "/health", "headers": [], "asgi": {}}

    async def published() -> bool:
        found = {}
        for document in readers:
            number = passage_number(tenant.salt, Passage(document))
            question = RoutedQuestion((number,), (len(document),), 0)
            first = await anext(reader.remote(Relayed(scope), question=question))
            found[document] = first[0]["name"]
        return found == readers

    for seconds in (3, 8, 8):  # so long it also believes what it has passed on itself
        await asyncio.sleep(seconds)
        if await published():
            return
    pytest.fail("The readers did not publish what they hold.")


async def test_passages_are_forgotten_by_all_readers(client: httpx.AsyncClient) -> None:
    document = {"id": "secret-1", "text": "Nobody shall know that Orn is a river."}
    async with asyncio.timeout(30):
        readers: set[str] = set()
        while len(readers) < 2:
            answers = [client.post(CHAT, json=body(documents=[document])) for _ in range(40)]
            readers |= {one.headers["x-reader"] for one in await asyncio.gather(*answers)}
    cached = (await ask(client, documents=[document]))["choices"][0]["message"]["rag"]
    assert cached["cached_windows"] == 1
    gone = await client.delete("/v1/passages/secret-1")
    assert gone.status_code == 200
    assert gone.json()["deleted"] >= 2
    again = await client.delete("/v1/passages/secret-1")
    told = again.json()
    assert (told["object"], told["id"]) == ("passages.deleted", "secret-1")
    assert (told["deleted"], told["passages"]) == (0, 0)
    other = {"Authorization": f"Bearer {KEYS['bert']}"}
    assert (await client.delete("/v1/passages/secret-1", headers=other)).status_code == 403


async def until(true: Callable[[], Any], seconds: float = 120) -> None:
    """Wait for something that is about to happen."""
    async with asyncio.timeout(seconds):
        while not await true():
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_ends_the_work(client: httpx.AsyncClient, stream: bool) -> None:
    endless = body(documents=DOCUMENTS, logit_bias=END, max_tokens=4000)

    async def busy() -> bool:
        return any((await samples(client, "rag_windows_batch_rows")).values())

    if stream:
        async with client.stream("POST", CHAT, json={**endless, "stream": True}) as answer:
            assert (await anext(answer.aiter_lines())).startswith("data: {")
    else:
        waiting = asyncio.create_task(client.post(CHAT, json=endless))
        await until(busy)
        waiting.cancel()

    async def idle() -> bool:
        return not await busy()

    await until(idle, 10)


def kill(reader: str) -> None:
    """End the process of a reader at once."""
    actor = ray.get_actor(f"SERVE_REPLICA::{NAME}#Reader#{reader}", namespace="serve")
    ray.kill(actor, no_restart=True)


async def test_a_question_whose_reader_dies_is_asked_again(client: httpx.AsyncClient) -> None:
    long = body(documents=DOCUMENTS, logit_bias=END, max_tokens=300)
    asked = asyncio.create_task(client.post(CHAT, json=long))
    busy: list[str] = []

    async def begun() -> bool:
        rows = await samples(client, "rag_windows_batch_rows")
        busy[:] = [name for name, value in rows.items() if value]
        return bool(busy)

    await until(begun)
    kill(busy[0])
    answer = await asked
    assert answer.status_code == 200
    assert answer.json()["usage"]["completion_tokens"] == 300
    assert answer.headers["x-reader"] != busy[0]


async def test_a_stream_whose_reader_dies_ends_with_an_error(client: httpx.AsyncClient) -> None:
    endless = body(documents=DOCUMENTS, logit_bias=END, max_tokens=4000, stream=True)
    async with client.stream("POST", CHAT, json=endless) as answer:
        lines = answer.aiter_lines()
        await anext(lines)
        kill(answer.headers["x-reader"])
        last = [line async for line in lines if line][-1]
    error = json.loads(last.removeprefix("data: "))["error"]
    assert error["type"] == "server_error"
    assert error["code"] == "unavailable"


async def test_no_request_is_lost_while_readers_are_replaced(
    client: httpx.AsyncClient, deploy: Deploy
) -> None:
    async def both() -> bool:
        return len(await samples(client, "rag_windows_batch_rows")) == 2

    await until(both)
    before = set(await samples(client, "rag_windows_batch_rows"))
    ended = asyncio.Event()
    answers: list[httpx.Response] = []

    async def asking(number: int) -> None:
        while not ended.is_set():
            document = f"Letter {number}. Zelwick Academy makes cheese."
            stream = number % 2 == 0
            answers.append(await client.post(CHAT, json=body(documents=[document], stream=stream)))
            await asyncio.sleep(0.2)

    async def replaced() -> bool:
        after = set(await samples(client, "rag_windows_batch_rows"))
        new = {one.headers["x-reader"] for one in answers} - before
        return len(after) == 2 and not before & after and bool(new)

    tasks = [asyncio.create_task(asking(number)) for number in range(4)]
    await asyncio.to_thread(deploy, passage_words=60)
    await until(replaced)
    ended.set()
    await asyncio.gather(*tasks)
    assert {one.status_code for one in answers} == {200}
    assert not [one for one in answers if '"error"' in one.text]
