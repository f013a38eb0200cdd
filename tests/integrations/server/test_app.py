"""What is around the answers: keys, tenants, names, logs, counters, the operator's routes."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from rag_windows import InputError, PassageCache, Scheduler, WindowedLM
from rag_windows_retrievers import BM25Retriever
from rag_windows_server import Keys, Settings, create_app
from tests.integrations.server.conftest import asking
from tests.integrations.server.test_chat import DOCUMENTS, QUESTION, ask, body
from tests.rag_windows import small
from tests.rag_windows.cache.shared_cases import between, failing
from tests.rag_windows.cache.shared_cases import fresh as fresh_store

ADA, OLGA = "a" * 32, "o" * 32


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.fixture
def fresh(lm: WindowedLM) -> WindowedLM:
    """The model with an empty cache."""
    return lm.with_cache(PassageCache("64MiB"))


async def test_key_files(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(f"# who may ask\nada {ADA}\nolga {OLGA} operator # she\n", encoding="utf-8")
    keys = Keys.load(path)
    ada, olga = (keys.tenant(f"Bearer {key}") for key in (ADA, OLGA))
    assert (ada.name, ada.operator, olga.name, olga.operator) == ("ada", False, "olga", True)
    assert ada.salt != olga.salt
    # The salt comes from the key alone: under another name it is the same.
    assert Keys([("other", ADA, False)]).tenant(f"bearer {ADA}").salt == ada.salt
    assert ADA not in repr(ada)
    for text in ("", f"ada {ADA} boss", "ada short-key", f"ada {ADA}\nbea {ADA}", "ada"):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(InputError) as raised:
            Keys.load(path)
        assert ADA not in str(raised.value)
    with pytest.raises(InputError):
        Keys.load(tmp_path / "none")


async def test_tenants_share_no_windows(fresh: WindowedLM) -> None:
    keys = Keys([("ada", ADA, False), ("olga", OLGA, True)])
    async with asking(create_app(fresh, keys=keys)) as client:

        async def cached(key: str) -> int:
            asked = body(documents=DOCUMENTS)
            answer = await client.post("/v1/chat/completions", json=asked, headers=bearer(key))
            found: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
            return found

        assert [await cached(key) > 0 for key in (ADA, ADA, OLGA, OLGA)] == [
            *(False, True),
            *(False, True),
        ]
        # What one forgets is forgotten for that tenant alone.
        gone = await client.delete("/v1/passages/z", headers=bearer(OLGA))
        assert gone.json()["deleted"] == 1
        assert await cached(ADA) > await cached(OLGA)
        for call in (
            client.post("/v1/passages/warm", json={}, headers=bearer(ADA)),
            client.delete("/v1/passages/z", headers=bearer(ADA)),
        ):
            assert (await call).status_code == 403


@pytest.mark.slow
@pytest.mark.parametrize("kept", [True, False], ids=["cache", "none"])
async def test_tenants_share_forward_passes_and_no_windows(fresh: WindowedLM, kept: bool) -> None:
    lm = fresh if kept else fresh.with_cache(None)
    known = [letter * 32 for letter in "abc"]
    keys = Keys([(key[0], key, False) for key in known])
    # Long enough that all are under way at once.
    end = {str(lm.tokenizer.eos_token_id): -100}
    asked = body(documents=DOCUMENTS, logit_bias=end, max_tokens=300)
    async with asking(create_app(lm, keys=keys)) as client:
        with small.passes() as made:
            answers = await asyncio.gather(
                *(
                    client.post("/v1/chat/completions", json=asked, headers=bearer(key))
                    for key in known * 2
                )
            )
    found = [answer.json() for answer in answers]
    assert len({one["choices"][0]["message"]["content"] for one in found}) == 1
    # In some of the passes more than two answers go on.
    assert len(made) < len(answers) * 300 / 2
    cached = [one["usage"]["prompt_tokens_details"]["cached_tokens"] for one in found]
    # Each tenant's windows are encoded for it, whatever the others read.
    again = lm.with_cache(PassageCache("64MiB"))
    repeated = [again.generate(QUESTION, DOCUMENTS, max_new_tokens=1) for _ in range(2)][1]
    for tenant in range(3):
        assert sum(cached[tenant::3]) <= repeated.usage.cached_tokens


async def test_an_operator_is_told_when_the_shared_store_can_not_forget(lm: WindowedLM) -> None:
    lm = lm.with_cache(PassageCache("64MiB", shared=fresh_store()))
    async with asking(create_app(lm, Settings())) as client:
        await client.post("/v1/passages/warm", json={"documents": DOCUMENTS})
        assert (await client.delete("/v1/passages/z")).json()["deleted"] == 1
        between(lm.cache, failing(ConnectionError("nobody there")))
        answer = await client.delete("/v1/passages/z")
        assert answer.status_code == 503
        assert "nobody there" in answer.json()["error"]["message"]
        assert (
            'rag_windows_cache_tier_stored_total{tier="shared"} 3'
            in (await client.get("/metrics")).text
        )


@pytest.mark.slow
async def test_warm_and_forget(fresh: WindowedLM, corpus: BM25Retriever) -> None:
    async with asking(create_app(fresh, Settings(), corpus)) as client:
        warmed = await client.post("/v1/passages/warm", json={"documents": DOCUMENTS})
        assert (warmed.json()["passages"], warmed.json()["encoded"]) == (2, 2)
        answer = await ask(client, documents=DOCUMENTS)
        rag = answer["choices"][0]["message"]["rag"]
        assert rag["cached_windows"] == rag["windows"] == 2
        assert (await client.delete("/v1/passages/z")).json()["deleted"] == 1
        rag = (await ask(client, documents=DOCUMENTS))["choices"][0]["message"]["rag"]
        assert rag["cached_windows"] == 1
        system = {"role": "system", "content": "Be brief."}
        asked = {"documents": DOCUMENTS[:1], "system": "Be brief.", "ttl": 60}
        assert (await client.post("/v1/passages/warm", json=asked)).json()["encoded"] == 1
        messages = [system, {"role": "user", "content": QUESTION}]
        answer = await ask(client, documents=DOCUMENTS[:1], messages=messages)
        assert answer["choices"][0]["message"]["rag"]["cached_windows"] == 1
        whole = (await client.post("/v1/passages/warm", json={})).json()
        assert whole["passages"] == len(corpus.passages)
        wrong = await client.post("/v1/passages/warm", json={"texts": []})
        assert wrong.json()["error"]["param"] == "texts"


async def test_the_default_instruction_is_of_questions_that_the_server_s_documents_answer(
    lm: WindowedLM, corpus: BM25Retriever
) -> None:
    system = {"role": "system", "content": "Be brief."}
    user = {"role": "user", "content": QUESTION}
    asked: list[tuple[bool, dict[str, Any]]] = [
        (True, {}),
        (True, {"rag": {"top_k": 2}}),
        (False, {"rag": {"top_k": 0}}),
        (False, {"documents": DOCUMENTS}),
        (False, {"messages": [system, user]}),
    ]
    told = "Say: not stated."
    async with (
        asking(create_app(lm, Settings(), corpus)) as plain,
        asking(create_app(lm, Settings(default_system=told), corpus)) as client,
        asking(
            create_app(lm, Settings(system="Be brief.", default_system=told), corpus)
        ) as operated,
    ):
        for sent, body in asked:
            counts = [(await ask(one, **body))["usage"]["prompt_tokens"] for one in (plain, client)]
            assert (counts[0] < counts[1]) is sent, body
            assert (counts[0] == counts[1]) is not sent, body
        # The operator's instruction takes its place.
        one, other = [await ask(of, messages=[system, user]) for of in (plain, client)]
        assert one["usage"]["prompt_tokens"] == other["usage"]["prompt_tokens"]
        its = (await ask(operated))["usage"]["prompt_tokens"]
        assert its == one["usage"]["prompt_tokens"]


async def test_the_server_s_documents_are_encoded_behind_the_default_instruction(
    fresh: WindowedLM, corpus: BM25Retriever
) -> None:
    settings, few = Settings(default_system="Say: not stated."), BM25Retriever(corpus.passages[:20])
    async with asking(create_app(fresh, settings, few)) as client:
        await client.post("/v1/passages/warm", json={})
        asked = few.passages[3].text
        messages = [{"role": "user", "content": asked}]
        rag = (await ask(client, messages=messages))["choices"][0]["message"]["rag"]
        assert rag["cached_windows"] == rag["windows"] > 0


async def test_without_a_cache(lm: WindowedLM) -> None:
    async with asking(create_app(lm.with_cache(None))) as client:
        answer = await client.post("/v1/passages/warm", json={"documents": ["A."]})
        assert answer.json()["error"]["code"] == "no_cache"
        assert (await client.get("/metrics")).status_code == 200


async def test_no_texts_in_logs(
    lm: WindowedLM, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.DEBUG, "rag_windows")
    app = create_app(lm)
    async with asking(app) as client:
        answer = await client.post("/v1/chat/completions", json=body(documents=DOCUMENTS, user="u"))
        await client.post("/v1/chat/completions", json=body(documents=DOCUMENTS, stream=True))
        assert answer.headers["x-request-id"] in caplog.text
        assert "user=u" in caplog.text

        def fails(*_: Any, **__: Any) -> None:
            raise ValueError(f"about {QUESTION}")

        monkeypatch.setattr(Scheduler, "submit", fails)
        monkeypatch.setattr(Scheduler, "answer", fails)
        for streamed in (False, True):
            asked = body(documents=DOCUMENTS, stream=streamed)
            failed = await client.post("/v1/chat/completions", json=asked)
            assert failed.status_code == 500
            assert QUESTION not in failed.text
            assert f"{failed.headers['x-request-id']} failed: ValueError" in caplog.text
    assert "Zelwick" not in caplog.text
    assert "cheese" not in caplog.text
    monkeypatch.undo()
    async with asking(create_app(lm, Settings(log_texts=True))) as client:
        await ask(client, documents=DOCUMENTS)
    assert QUESTION in caplog.text


async def test_counters(lm: WindowedLM) -> None:
    app = create_app(lm)
    async with asking(app) as client:
        await ask(client, documents=DOCUMENTS)
        await ask(client, documents=DOCUMENTS, max_tokens=1)
        await client.post("/v1/chat/completions", json=body(store=True))
        await client.post("/v1/chat/completions", json=body(stream=True, documents=DOCUMENTS))
        text = (await client.get("/metrics")).text
    for line in (
        'rag_windows_requests_total{route="/v1/chat/completions",status="200"} 3.0',
        'rag_windows_requests_total{route="/v1/chat/completions",status="400"} 1.0',
        'rag_windows_answers_total{outcome="stop",tenant="everyone"} 2.0',
        'rag_windows_answers_total{outcome="length",tenant="everyone"} 1.0',
        'rag_windows_tokens_total{kind="completion",tenant="everyone"} 5.0',
        "rag_windows_time_to_first_token_seconds_count 3.0",
        "rag_windows_batch_rows 0.0",
        "rag_windows_queue_requests 0.0",
    ):
        assert line in text
    assert "rag_windows_cache_hits_total" in text
    assert 'rag_windows_cache_tier_bytes{tier="memory"}' in text


async def test_names_and_origins(lm: WindowedLM) -> None:
    preflight = {
        "Origin": "https://a.example",
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "content-type",
    }
    async with asking(create_app(lm)) as client:
        answer = await client.options("/v1/chat/completions", headers=preflight)
        assert "access-control-allow-origin" not in answer.headers
    allowed = Settings(cors=("https://a.example",), hosts=("server",))
    async with asking(create_app(lm, allowed)) as client:
        answer = await client.options("/v1/chat/completions", headers=preflight)
        assert answer.headers["access-control-allow-origin"] == "https://a.example"
        other = await client.get("/health", headers={"Host": "evil.example:80"})
        assert (other.status_code, other.json()["error"]["code"]) == (421, "unknown_host")
        assert (await client.get("/health", headers={"Host": "server:80"})).status_code == 200


async def test_errors_have_one_form(client: httpx.AsyncClient) -> None:
    for answer in (
        await client.get("/v1/nothing"),
        await client.get("/v1/chat/completions"),
        await client.get("/v1/models/other"),
    ):
        assert answer.status_code in (404, 405)
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
        assert answer.headers["x-request-id"].startswith("req_")


async def test_pages_of_the_api(client: httpx.AsyncClient) -> None:
    api = (await client.get("/openapi.json")).json()
    assert {"/v1/chat/completions", "/v1/passages/warm", "/metrics"} <= api["paths"].keys()
    assert (await client.get("/docs")).status_code == 404


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGTERM to wait for")
def test_the_command(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "rag_windows.cli", "serve", "--port", "0"]
    environment = {**os.environ, "RAG_WINDOWS_CACHE_DIR": str(tmp_path / "cache")}
    environment.pop("RAG_WINDOWS_MODEL", None)
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stderr is not None
        told = next(line for line in process.stderr if " on http://" in line)
        answer = httpx.post(
            f"{told.split()[-1]}/v1/chat/completions", json=body(), timeout=60
        ).json()
        assert answer["choices"][0]["message"]["content"] == "cheese"
        begun = time.monotonic()
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    assert process.returncode == 0
    assert time.monotonic() - begun < 20
    assert [*(tmp_path / "cache").rglob("*")]


@pytest.mark.slow
def test_what_the_command_refuses(tmp_path: Path) -> None:
    for arguments, told in (
        (["--api-key-file", str(tmp_path / "none")], "none"),
        (["--refuse", "everything"], "--refuse"),
    ):
        command = [sys.executable, "-m", "rag_windows.cli", "serve", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 2
        assert told in done.stderr
