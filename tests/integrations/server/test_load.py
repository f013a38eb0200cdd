"""Many requests, clients that leave, limits, and the end: nothing hangs and nothing is lost."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from rag_windows import PassageCache, WindowedLM
from rag_windows_retrievers import BM25Retriever
from rag_windows_server import Settings, create_app
from rag_windows_server.process import Server
from tests.integrations.server.conftest import asking
from tests.integrations.server.test_chat import DOCUMENTS, body

Listen = Callable[[FastAPI], str]


@pytest.fixture
def endless(lm: WindowedLM) -> dict[str, Any]:
    """A request whose answer does not end by itself before thousands of tokens."""
    end = str(lm.tokenizer.eos_token_id)
    return body(documents=DOCUMENTS, logit_bias={end: -100}, max_tokens=4000)


async def until(true: Callable[[], bool]) -> None:
    """Wait for something that is about to happen."""
    async with asyncio.timeout(20):
        while not true():
            await asyncio.sleep(0.01)


async def test_queue(lm: WindowedLM, endless: dict[str, Any]) -> None:
    app = create_app(lm, Settings(max_rows=1, most_waiting=1, wait_s=0.3))
    line = app.state.served.answering.line
    async with asking(app) as client:
        first = asyncio.create_task(client.post("/v1/chat/completions", json=endless))
        await until(lambda: line.working == 1)
        second = asyncio.create_task(client.post("/v1/chat/completions", json=body()))
        await until(lambda: line.waiting == 1)
        third = await client.post("/v1/chat/completions", json=body(stream=True))
        assert (third.status_code, third.json()["error"]["code"]) == (429, "queue_full")
        assert int(third.headers["retry-after"]) >= 1
        late = await second
        assert late.status_code == 503
        assert int(late.headers["retry-after"]) >= 1
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        assert (line.working, line.waiting) == (0, 0)
        assert (await client.post("/v1/chat/completions", json=body())).status_code == 200


async def test_limits(lm: WindowedLM) -> None:
    app = create_app(lm, Settings(most_body_bytes=2000, most_documents=2, most_prompt_tokens=60))
    async with asking(app) as client:
        for fields, status, code in (
            ({"documents": ["A" * 3000]}, 413, "body_too_large"),
            ({"documents": ["A", "B", "C"]}, 400, "too_many"),
            ({"documents": ["A b c d e. " * 40]}, 400, "context_length_exceeded"),
            ({"documents": ["A b c."]}, 200, None),
        ):
            answer = await client.post("/v1/chat/completions", json=body(**fields))
            assert answer.status_code == status, answer.text
            assert code is None or answer.json()["error"]["code"] == code
        wide = body(documents=["A b."], max_tokens=4000)
        wide["messages"][0]["content"] = "Who is it? " * 20
        answer = await client.post("/v1/chat/completions", json=wide)
        assert answer.json()["error"]["code"] == "context_length_exceeded"


async def test_the_event_loop_is_free(client: httpx.AsyncClient, endless: dict[str, Any]) -> None:
    work = asyncio.create_task(client.post("/v1/chat/completions", json={**endless, "n": 2}))
    waits = []
    for _ in range(20):
        begun = time.perf_counter()
        assert (await client.get("/health")).status_code == 200
        waits.append(time.perf_counter() - begun)
        await asyncio.sleep(0.02)
    work.cancel()
    await asyncio.gather(work, return_exceptions=True)
    assert sorted(waits)[10] < 0.25


async def test_the_end(lm: WindowedLM, endless: dict[str, Any]) -> None:
    app = create_app(lm, Settings(max_rows=2))
    server = Server(app, port=0, grace_s=0.5)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    await until(lambda: server.started)
    line = app.state.served.answering.line
    asked = "/v1/chat/completions"
    async with httpx.AsyncClient(base_url=server.address, timeout=30) as client:
        whole = asyncio.create_task(client.post(asked, json=endless))
        stream = asyncio.create_task(client.post(asked, json={**endless, "stream": True}))
        await until(lambda: line.working == 2)
        waiting = asyncio.create_task(client.post(asked, json=body()))
        await until(lambda: line.waiting == 1)
        begun = time.monotonic()
        server.should_exit = True
        answers = await asyncio.gather(whole, stream, waiting)
    await asyncio.to_thread(thread.join, 20)
    assert not thread.is_alive()
    assert time.monotonic() - begun < 8
    assert [one.status_code for one in answers] == [503, 200, 503]
    assert "unavailable" in answers[1].text
    assert "[DONE]" not in answers[1].text


@pytest.mark.slow
async def test_warming_ends_when_nobody_waits(
    listening: Listen, lm: WindowedLM, corpus: BM25Retriever
) -> None:
    cache = PassageCache("64MiB")
    app = create_app(lm.with_cache(cache), Settings(), corpus)

    def entries() -> int:
        return cache.stats().tiers["memory"].entries

    slow = lm.model.get_input_embeddings().register_forward_hook(lambda *_: time.sleep(0.5))
    try:
        async with httpx.AsyncClient(base_url=listening(app), timeout=30) as client:
            with pytest.raises(httpx.ReadTimeout):
                await client.post("/v1/passages/warm", json={}, timeout=0.3)
            before = -1
            while entries() > before:  # what was under way ends
                before = entries()
                await asyncio.sleep(1.5)
    finally:
        slow.remove()
    assert before < len(corpus.passages) / 2
