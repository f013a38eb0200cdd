"""What operators and proxies rely on: deletions, heads, slashes, names, what is missing."""

from __future__ import annotations

import importlib
import logging
from pathlib import Path
from typing import Any

import httpx
import pytest

from rag_windows import Passage, PassageCache, WindowedLM
from rag_windows_retrievers import BM25Retriever
from rag_windows_server import Keys, Settings, create_app
from tests.integrations.server.conftest import asking
from tests.integrations.server.test_chat import DOCUMENTS, ask, body, events
from tests.tool_models import scripted

CHAT = "/v1/chat/completions"


def read_of(answer: dict[str, Any]) -> list[str]:
    return [one["id"] for one in answer["choices"][0]["message"]["citations"]]


# Documents that were deleted


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "passages"),
    [("zelwick-academy.md#1", 1), ("zelwick-academy.md", None), ("nothing.md", 0)],
)
@pytest.mark.parametrize("cached", [True, False])
async def test_what_was_deleted_is_not_retrieved(
    lm: WindowedLM, corpus: BM25Retriever, name: str, passages: int | None, cached: bool
) -> None:
    own = lm.with_cache(PassageCache("64MiB") if cached else None)
    async with asking(create_app(own, Settings(top_k=4), corpus)) as client:
        before = read_of(await ask(client))
        done = (await client.delete(f"/v1/passages/{name}")).json()
        known = [one.id for one in corpus.passages if one.id]
        named = [one for one in known if one == name or one.startswith(f"{name}#")]
        assert done["passages"] == len(named) == (len(named) if passages is None else passages)
        assert done["deleted"] == (len({*named} & {*before}) if cached else 0)
        assert "read again when the server starts" in done["message"]
        after = read_of(await ask(client))
        assert len(after) == len(before) == 4
        assert not {*named} & {*after}
        if cached:
            warmed = (await client.post("/v1/passages/warm", json={})).json()
            assert warmed["passages"] == len(known) - len(named)
        again = (await client.delete(f"/v1/passages/{name}")).json()
        assert (again["passages"], again["deleted"]) == (0, 0)
        # What a request brings is its own affair.
        brought = await ask(client, documents=[{"id": name, "text": "Zelwick makes cheese."}])
        assert read_of(brought) == [name]
    # Another server, as after a restart, has them again.
    async with asking(create_app(own, Settings(top_k=4), corpus)) as client:
        assert read_of(await ask(client)) == before


async def test_a_retriever_that_lists_nothing(lm: WindowedLM) -> None:
    class Few:
        def retrieve(self, query: str, k: int) -> list[Passage]:
            return [Passage(f"Letter {i} of {query}.", id=f"{i}") for i in range(20)][:k]

    async with asking(create_app(lm, Settings(top_k=3), Few())) as client:
        for gone in ("0", "2", "3", "4"):
            await client.delete(f"/v1/passages/{gone}")
        assert read_of(await ask(client)) == ["1", "5", "6"]
        assert len(read_of(await ask(client, rag={"top_k": 30}))) == 16


async def test_who_is_no_operator_deletes_nothing(lm: WindowedLM, corpus: BM25Retriever) -> None:
    keys = Keys([("ada", "a" * 32, False)])
    async with asking(create_app(lm, Settings(), corpus, keys=keys)) as client:
        client.headers["Authorization"] = "Bearer " + "a" * 32
        before = read_of(await ask(client))
        assert (await client.delete(f"/v1/passages/{before[0]}")).status_code == 403
        assert read_of(await ask(client)) == before


# Heads, slashes, names

GETS = ["/", "/health", "/ready", "/v1/models", "/v1/models/tiny-reader", "/metrics"]


@pytest.mark.parametrize("path", [*GETS, "/openapi.json", "/page/page.js", "/page/examples"])
async def test_heads(client: httpx.AsyncClient, path: str) -> None:
    whole, head = await client.get(path), await client.head(path)
    assert head.status_code == whole.status_code == 200
    assert head.content == b""
    assert head.headers["content-type"] == whole.headers["content-type"]
    if path != "/metrics":
        assert head.headers["content-length"] == whole.headers["content-length"]


async def test_heads_of_other_routes(client: httpx.AsyncClient) -> None:
    for path, status in ((CHAT, 405), ("/v1/nothing", 404), ("/v1/models/x", 404)):
        answer = await client.head(path)
        assert (answer.status_code, answer.content) == (status, b"")


@pytest.mark.parametrize("path", [*GETS[1:], CHAT, "/v1/responses", "/v1/passages/warm"])
async def test_slashes_at_the_end(client: httpx.AsyncClient, path: str) -> None:
    """Nobody is sent elsewhere: a proxy's scheme and name are not known here."""
    given = body(documents=DOCUMENTS)
    if path == "/v1/responses":
        given["input"] = given.pop("messages")
    if path.endswith("warm"):
        given = {"documents": ["A."]}
    method, json = ("GET", None) if path in GETS else ("POST", given)
    for slashes in ("/", "//"):
        answer = await client.request(
            method,
            path + slashes,
            json=json,
            headers={"X-Forwarded-Proto": "https", "Host": "rag.example"},
        )
        assert answer.status_code == 200, answer.text
        assert "location" not in answer.headers


async def test_a_model_under_several_names(lm: WindowedLM) -> None:
    names = Settings(model_name="reader", model_aliases=("/data/models/reader",))
    async with asking(create_app(lm, names)) as client:
        listed = (await client.get("/v1/models")).json()["data"]
        assert [one["id"] for one in listed] == ["reader"]
        for name in ("reader", "/data/models/reader"):
            answer = await ask(client, model=name, documents=DOCUMENTS)
            assert answer["model"] == "reader"
            assert (await events(client, model=name, documents=DOCUMENTS))[0]["model"] == "reader"
            assert (await client.get(f"/v1/models/{name}")).json()["id"] == "reader"
        other = await client.post(CHAT, json=body(model="models/reader"))
        assert other.status_code == 404


@pytest.mark.parametrize(
    ("model", "given", "name"),
    [
        ("meta-llama/Llama-3.1-8B", None, "Llama-3.1-8B"),
        ("/srv/models/smollm2-hf/", None, "smollm2-hf"),
        ("C:\\models\\qwen", None, "qwen"),
        ("./reader", None, "reader"),
        (".", None, Path.cwd().name),
        ("models/q/q.gguf", "mine", "mine"),
        (None, None, "tiny-reader"),
    ],
)
def test_names_on_the_command_line(model: str | None, given: str | None, name: str) -> None:
    serve = importlib.import_module("rag_windows_server.command")
    options = importlib.import_module("rag_windows.cli")
    server = serve.ServeOptions(served_model_name=given, allow_host=["RAG.example"])
    chosen = options.LoadOptions(model=model)
    settings = serve._settings(options.SearchOptions(), chosen, server)
    assert settings.model_name == name
    assert settings.serves(chosen.name)
    assert {"rag.example", "localhost"} <= {*settings.hosts}


# What is missing here


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"response_format": {"type": "json_object"}}),
        ("/v1/responses", {"text": {"format": {"type": "json_object"}}}),
        (
            CHAT,
            {
                "tools": [
                    {"type": "function", "function": {"name": "f", "strict": True}},
                ],
                "tool_choice": "required",
            },
        ),
    ],
)
async def test_a_missing_extra_is_the_operators_affair(
    lm: WindowedLM,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    path: str,
    fields: dict[str, Any],
) -> None:
    monkeypatch.setattr("rag_windows.errors.installed", lambda package: package != "llguidance")
    monkeypatch.setattr(
        "rag_windows.prompt.answer_form.installed", lambda package: package != "llguidance"
    )
    # The shipped model's template shows no tools.
    lm = scripted("hermes", "No.") if "tools" in fields else lm
    given = body(**fields)
    if path == "/v1/responses":
        given["input"] = given.pop("messages")
    async with asking(create_app(lm)) as client:
        answer = await client.post(path, json=given)
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert "Its operator can install it." in error["message"]
    assert "pip" not in error["message"]
    assert 'pip install "rag-windows[structured]"' in caplog.text
    assert caplog.records[-1].levelno >= logging.INFO


async def test_places_of_passages(lm: WindowedLM) -> None:
    documents: list[Any] = [
        {"title": "Letters", "text": "Zelwick makes cheese.", "metadata": {"page": 3}},
        {"title": "Letters", "text": "Sulava is a town.", "metadata": {"section": "Towns"}},
        {"title": "Letters", "text": "Orn is a river."},
    ]
    async with asking(create_app(lm)) as client:
        answer = await ask(client, documents=documents)
    places = [one["place"] for one in answer["choices"][0]["message"]["citations"]]
    assert places == ["page 3", "Towns", None]
