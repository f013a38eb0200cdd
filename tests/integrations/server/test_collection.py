"""Documents that come, change and go while the server runs, and their windows with them."""

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from fastapi import FastAPI

from rag_windows import PassageCache, WindowedLM
from rag_windows_retrievers import Document, Index
from rag_windows_server import Keys, Settings, create_app
from rag_windows_server.collection import Collection
from tests.integrations.server.conftest import asking
from tests.integrations.server.test_chat import ask, body

ADA, OPERATOR = "a" * 32, "o" * 32


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    """A folder of two documents."""
    folder = tmp_path / "docs"
    folder.mkdir()
    (folder / "academy.md").write_text("Zelwick Academy makes cheese.\n", encoding="utf-8")
    (folder / "river.md").write_text(
        "The river Orn flows past Zelwick Academy.\n", encoding="utf-8"
    )
    return folder


@pytest.fixture
def index(docs: Path, tmp_path: Path) -> Index:
    """An index that holds them."""
    made = Index(tmp_path / "index", root=docs)
    made.follow([docs])
    return made


@pytest.fixture
def own(lm: WindowedLM, tmp_path: Path) -> WindowedLM:
    """The model with a cache of this test, in memory and on disk."""
    return lm.with_cache(PassageCache("64MiB", "64MiB", tmp_path / "cache"))


@contextmanager
def running(app: FastAPI, *follow: Path) -> Iterator[Collection]:
    """The application as it is between its start and its end."""
    collection: Collection = app.state.served.answering.collection
    collection.start(map(str, follow))
    try:
        yield collection
    finally:
        collection.close()


def within(seconds: float, true: Callable[[], object]) -> float:
    """Wait until something is true; how long that took."""
    begun = time.monotonic()
    while not true():
        assert time.monotonic() - begun < seconds
        time.sleep(0.02)
    return time.monotonic() - begun


def read_of(answer: dict[str, Any]) -> list[str]:
    return [one["id"] for one in answer["choices"][0]["message"]["citations"]]


def texts(answer: dict[str, Any]) -> str:
    return " ".join(one["text"] for one in answer["choices"][0]["message"]["citations"])


def held(lm: WindowedLM, *ids: str) -> int:
    """How many windows of some documents the tiers hold."""
    assert lm.cache is not None
    lm.cache.flush()
    named = lm.cache.digests(ids)
    return sum(len(tier.keys_with(named)) for tier in (lm.cache.memory, lm.cache.disk) if tier)


@pytest.mark.slow
@pytest.mark.parametrize("given", ["", "academy.md", "*.md", "**/*.md"])
async def test_an_edit_is_answered_and_told(
    own: WindowedLM,
    docs: Path,
    tmp_path: Path,
    given: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "rag_windows.server")
    index = Index(tmp_path / "other", root=docs)
    index.follow([docs / given])
    app = create_app(own, Settings(), index)
    with running(app, docs / given) as collection:
        async with asking(app) as client:
            assert "cheese" in texts(await ask(client))
            assert held(own, "academy.md") == 2
            time.sleep(0.6)
            version = index.version
            (docs / "academy.md").write_text("Zelwick Academy makes kites.", encoding="utf-8")
            within(2, lambda: index.version > version)
            within(1, lambda: not collection._stale.waits())
            assert held(own, "academy.md") == 0
            answer = await ask(client)
            assert "kites" in texts(answer)
            assert "cheese" not in texts(answer)
            version = index.version
            (docs / "academy.md").unlink()
            within(2, lambda: index.version > version)
            within(1, lambda: not held(own, "academy.md"))
            assert "academy.md#1" not in read_of(await ask(client))
            if given != "academy.md":
                (docs / "new.md").write_text("Zelwick Academy closed.", encoding="utf-8")
                within(2, lambda: index.documents("new.md"))
                assert "new.md#1" in read_of(await ask(client))
    assert "1 replaced (academy.md)" in caplog.text
    assert "1 removed (academy.md)" in caplog.text


def test_unreadable_files_are_told_once(
    own: WindowedLM, index: Index, docs: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "rag_windows.server")
    app = create_app(own, Settings(), index)
    with running(app, docs):
        time.sleep(0.6)
        (docs / "academy.md").write_bytes(b"Damaged: \xff.")
        within(2, lambda: not index.documents("academy.md"))
        (docs / "more.md").write_text("More.", encoding="utf-8")
        within(2, lambda: index.documents("more.md"))
    told = [one for one in caplog.messages if "can't be read, and is not retrieved" in one]
    assert len(told) == 1
    assert told[0].startswith("academy.md")


@pytest.mark.slow
def test_a_folder_that_goes_and_comes(own: WindowedLM, index: Index, docs: Path) -> None:
    app = create_app(own, Settings(), index)
    with running(app, docs, docs.parent / "missing"):
        time.sleep(0.6)
        docs.rename(docs.parent / "moved")
        within(3, lambda: not index.documents())
        (docs.parent / "moved").rename(docs)
        within(3, lambda: len(index.documents()) == 2)
        time.sleep(0.6)
        (docs / "river.md").write_text("The river Orn is dry.", encoding="utf-8")
        within(2, lambda: "dry" in index.passages_of(["river.md"])[0].text)


def test_urls_are_not_watched(
    own: WindowedLM, index: Index, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "rag_windows.server")
    app = create_app(own, Settings(), index)
    collection: Collection = app.state.served.answering.collection
    collection.start(["s3://bucket/notes"])
    collection.close()
    assert "Changes behind URLs are taken up at the next start only: s3://bucket" in caplog.text


ELSEWHERE = """
import sys
from rag_windows_retrievers import Index
Index(sys.argv[1]).remove("academy.md")
"""


async def test_another_process_changes_the_index(own: WindowedLM, index: Index) -> None:
    app = create_app(own, Settings(), index)
    with running(app):
        async with asking(app) as client:
            await ask(client)
            assert held(own, "academy.md") == 2
            command = [sys.executable, "-c", ELSEWHERE, str(index.folder)]
            await asyncio.to_thread(subprocess.run, command, check=True)
            await asyncio.to_thread(within, 1.5, lambda: not held(own, "academy.md"))
            assert held(own, "river.md") == 2
            assert "academy.md#1" not in read_of(await ask(client))


def test_what_changed_while_no_server_ran(own: WindowedLM, index: Index) -> None:
    """Windows on disk go at the next start, and only those."""
    create_app(own, Settings(), index).state.served.answering.collection.sync()
    own.warm(index.passages)
    index.remove("academy.md")
    with running(create_app(own, Settings(), index)) as collection:
        within(2, lambda: collection._stale.version == index.version)
        assert (held(own, "academy.md"), held(own, "river.md")) == (0, 2)
    # Again nothing has changed.
    with running(create_app(own, Settings(), index)):
        time.sleep(0.2)
        assert held(own, "river.md") == 2


# Routes


async def test_documents_are_added_listed_and_removed(own: WindowedLM, index: Index) -> None:
    async with asking(create_app(own, Settings(top_k=3), index)) as client:
        given: dict[str, list[Any]] = {
            "documents": [
                {"id": "letters/7", "title": "Letter", "text": "Zelwick Academy moved to Orn."},
                "Zelwick Academy teaches the lute.",
            ]
        }
        done = (await client.post("/v1/documents", json=given)).json()
        assert done["added"][0] == "letters/7"
        assert [one["passages"] for one in done["data"]] == [1, 1]
        assert {"letters/7", "academy.md#1"} <= {*read_of(await ask(client))}
        again = (await client.post("/v1/documents", json=given)).json()
        assert (again["unchanged"], again["data"]) == (2, [])
        one = (await client.get("/v1/documents/letters/7")).json()
        assert (one["id"], one["title"], one["source"]) == ("letters/7", "Letter", None)
        found, after = [], None
        while True:
            params = {"limit": 3, **({"after": after} if after else {})}
            page = (await client.get("/v1/documents", params=params)).json()
            found += [one["id"] for one in page["data"]]
            if not page["has_more"]:
                break
            after = page["last_id"]
        assert found == [one.id for one in index.documents()]
        assert page["totals"] == {"files": 4, "documents": 4, "passages": 4}

        given["documents"][0]["text"] = "Zelwick Academy burned down."
        done = (await client.post("/v1/documents", json=given)).json()
        assert (done["replaced"], done["unchanged"]) == (["letters/7"], 1)
        assert done["windows"] == 1
        assert "burned" in texts(await ask(client))

        gone = (await client.delete("/v1/documents/letters/7")).json()
        counts = (gone["documents"], gone["passages"], gone["windows"])
        assert counts == (1, 1, 1)
        assert held(own, "letters/7") == 0
        assert "letters/7" not in read_of(await ask(client))
        for method in ("GET", "DELETE"):
            answer = await client.request(method, "/v1/documents/letters/7")
            assert answer.status_code == 404
            assert answer.json()["error"]["code"] == "document_not_found"


async def test_passages_are_deleted_for_good(own: WindowedLM, index: Index, docs: Path) -> None:
    async with asking(create_app(own, Settings(), index)) as client:
        await ask(client)
        done = (await client.delete("/v1/passages/academy.md%231")).json()
        assert (done["passages"], done["deleted"]) == (1, 1)
        assert "read again when the server starts" not in done["message"]
        done = (await client.delete("/v1/passages/river.md")).json()
        assert (done["passages"], done["deleted"]) == (1, 1)
        assert read_of(await ask(client)) == []
    index.follow([docs])
    assert len(index) == 0


async def test_files_are_uploaded(own: WindowedLM, index: Index) -> None:
    rows = b'{"id": "r1", "text": "Zelwick Academy has a choir."}\nno json\n{"text": "A row."}\n'
    async with asking(create_app(own, Settings(), index)) as client:
        files = [
            ("file", ("rows.jsonl", rows)),
            ("file", ("../../etc/p\u00e4ge.md", b"# Page\n\nZelwick Academy has a boat.")),
        ]
        answer = await client.post("/v1/documents", files=files)
        done = answer.json()
        assert answer.status_code == 200, done
        assert done["added"] == ["r1", "rows.jsonl:3", "p\u00e4ge.md"]
        assert [one["name"] for one in done["skipped"]] == ["rows.jsonl:2"]
        assert {one["source"] for one in done["data"]} == {"rows.jsonl", "p\u00e4ge.md"}
        assert "choir" in texts(await ask(client))
        # The file as a whole is replaced, and removed.
        shorter = [("file", ("rows.jsonl", b'{"id": "r1", "text": "No choir."}'))]
        done = (await client.post("/v1/documents", files=shorter)).json()
        assert (done["replaced"], done["removed"]) == (["r1"], ["rows.jsonl:3"])
        done = (await client.delete("/v1/documents/rows.jsonl")).json()
        assert (done["documents"], done["passages"]) == (1, 1)
        assert not index.documents("r1")


@pytest.mark.parametrize(
    ("name", "data", "code"),
    [
        ("a.pdf", b"%PDF-1.4 broken", "unreadable_file"),
        ("a.bin", b"\x00\x01\x02", "unreadable_file"),
        ("a.md", b"  ", "unreadable_file"),
        ("..", b"Text.", "invalid_value"),
        ("a\x1b[2Jb.md", b"Text.", "invalid_value"),
        ("a\nb.md", b"Text.", "invalid_value"),
        ("a" * 600 + ".md", b"Text.", "invalid_value"),
    ],
)
async def test_files_that_are_refused(
    own: WindowedLM, index: Index, name: str, data: bytes, code: str
) -> None:
    before = index.version
    async with asking(create_app(own, Settings(), index)) as client:
        for path in ("/v1/documents", "/v1/files"):
            answer = await client.post(path, files=[("file", (name, data))])
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, code)
    assert index.version == before


async def test_names_open_no_file(own: WindowedLM, index: Index, docs: Path) -> None:
    secret = docs.parent / "secret.md"
    secret.write_text("Zelwick secret.", encoding="utf-8")
    async with asking(create_app(own, Settings(), index)) as client:
        files = [("file", (str(secret), b"Nothing."))]
        done = (await client.post("/v1/documents", files=files)).json()
        assert done["added"] == ["secret.md"]
        assert index.passages_of(["secret.md"])[0].text == "Nothing."
        for path in (f"/v1/documents/{secret}", "/v1/documents/../secret.md", "/v1/files/..%2Fa"):
            assert (await client.get(path)).status_code == 404


@pytest.mark.parametrize(
    ("kind", "sent", "code"),
    [
        ("multipart/form-data", b"--x--", "invalid_form"),
        ("multipart/form-data; boundary=x", b"", "invalid_form"),
        ("multipart/form-data; boundary=x", b"--x\r\nno head", "invalid_form"),
        ("multipart/form-data; boundary=x", b"--x\r\nA: b\r\n\r\nc\r\n--x--", "invalid_form"),
        ("multipart/form-data; boundary=x", b"--x--\r\n", "missing_required_parameter"),
        ("application/json", b'{"documents": [{"text": " "}]}', "invalid_value"),
        ("application/json", b'{"documents": [{"id": "a\\u0000", "text": "A."}]}', "invalid_value"),
        ("application/json", b'{"documents": [{"id": "\\ud800", "text": "A."}]}', None),
        ("application/json", b'{"documents": ["A."], "more": 1}', "unknown_parameter"),
        ("text/plain", b"A.", "unsupported_media_type"),
    ],
)
async def test_bodies_that_are_refused(
    own: WindowedLM, index: Index, kind: str, sent: bytes, code: str | None
) -> None:
    before = index.version
    async with asking(create_app(own, Settings(), index)) as client:
        answer = await client.post("/v1/documents", content=sent, headers={"Content-Type": kind})
    assert answer.status_code in (400, 415)
    assert code is None or answer.json()["error"]["code"] == code
    assert index.version == before


async def test_limits_of_bodies(own: WindowedLM, index: Index) -> None:
    async with asking(create_app(own, Settings(most_body_bytes=1000), index)) as client:
        large = [("file", ("a.md", b"A " * 1000))]
        for path in ("/v1/documents", "/v1/files"):
            assert (await client.post(path, files=large)).status_code == 413
        sent = {"documents": ["A " * 1000]}
        assert (await client.post("/v1/documents", json=sent)).status_code == 413
        for limit in (0, 10_001, "x"):
            answer = await client.get("/v1/documents", params={"limit": limit})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "limit")
        assert (await client.get("/v1/documents?after=nothing")).status_code == 400


ROUTES = [
    ("POST", "/v1/documents"),
    ("GET", "/v1/documents"),
    ("GET", "/v1/documents/a"),
    ("DELETE", "/v1/documents/a"),
    ("POST", "/v1/files"),
    ("GET", "/v1/files"),
    ("GET", "/v1/files/a"),
    ("GET", "/v1/files/a/content"),
    ("DELETE", "/v1/files/a"),
    ("POST", "/v1/vector_stores"),
    ("GET", "/v1/vector_stores"),
    ("GET", "/v1/vector_stores/vs_documents"),
    ("POST", "/v1/vector_stores/vs_documents/files"),
    ("GET", "/v1/vector_stores/vs_documents/files"),
    ("DELETE", "/v1/vector_stores/vs_documents/files/a"),
]


@pytest.mark.parametrize(("method", "path"), ROUTES)
async def test_who_may_not(own: WindowedLM, index: Index, method: str, path: str) -> None:
    keys = Keys([("ada", ADA, False), ("ops", OPERATOR, True)])
    async with asking(create_app(own, Settings(), index, keys=keys)) as client:
        assert (await client.request(method, path)).status_code == 401
        client.headers["Authorization"] = f"Bearer {ADA}"
        assert (await client.request(method, path)).status_code == 403
    # And nobody may where nothing can change.
    async with asking(create_app(own, Settings())) as client:
        answer = await client.request(method, path)
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "no_index")
        assert "Start it with --docs" in answer.json()["error"]["message"]


async def test_windows_of_all_tenants_go(own: WindowedLM, index: Index) -> None:
    keys = Keys([("ada", ADA, False), ("ops", OPERATOR, True)])
    app = create_app(own, Settings(), index, keys=keys)
    models = [app.state.served.answering.model(one) for one in keys.tenants]
    async with asking(app) as client:
        for key in (ADA, OPERATOR):
            client.headers["Authorization"] = f"Bearer {key}"
            await ask(client)
        assert [held(lm, "academy.md") for lm in models] == [2, 2]
        done = (await client.delete("/v1/documents/academy.md")).json()
        assert done["windows"] == 2
        assert [held(lm, "academy.md") for lm in models] == [0, 0]
        assert [held(lm, "river.md") for lm in models] == [2, 2]


@pytest.mark.parametrize("kind", ["changed", "removed"])
@pytest.mark.parametrize("stream", [False, True])
async def test_answers_under_way_say_so(
    own: WindowedLM,
    index: Index,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    stream: bool,
) -> None:
    app = create_app(own, Settings(), index)
    answering = app.state.served.answering
    prepare = answering._prepared

    def prepared(*given: Any) -> Any:
        made = prepare(*given)
        if kind == "changed":
            index.add(Document("Zelwick Academy makes kites.", "academy.md", named=True))
        else:
            index.remove("academy.md")
        # As if the poller came before the first window is encoded.
        answering.collection.sync()
        return made

    monkeypatch.setattr(answering, "_prepared", prepared)
    async with asking(app) as client:
        if stream:
            answer = await client.post("/v1/chat/completions", json=body(stream=True))
            lines = answer.text.split("\n\n")
            events = [json.loads(one[6:]) for one in lines if one.startswith("data: {")]
            deltas = [one["choices"][0]["delta"] for one in events if one["choices"]]
            (rag,) = [one["rag"] for one in deltas if "rag" in one]
        else:
            given = await ask(client)
            rag = given["choices"][0]["message"]["rag"]
            assert "cheese" in texts(given)
        note = f"The document 'academy.md' was {kind} while this answer was written; it was "
        assert [one for one in rag["notes"] if one.startswith(note)]
        assert not [one for one in rag["notes"] if "river" in one]
        assert held(own, "academy.md") == 2
        answering.collection.sync()
        assert held(own, "academy.md") == 0
        monkeypatch.undo()
        again = await ask(client)
        assert not again["choices"][0]["message"]["rag"]["notes"]


async def test_questions_while_documents_change(own: WindowedLM, index: Index) -> None:
    """Nobody gets an error, and no answer cites what was deleted before it was asked."""
    app = create_app(own, Settings(top_k=4), index)
    done = threading.Event()

    def change() -> None:
        number = 0
        while not done.is_set():
            number += 1
            index.add(Document(f"Zelwick Academy, year {number}.", "year", named=True))
            index.add(Document(f"Zelwick Academy, month {number}.", f"m{number}", named=True))
            index.remove(f"m{number - 1}")

    with running(app):
        thread = threading.Thread(target=change)
        thread.start()
        try:
            async with asking(app) as client:
                for _ in range(4):
                    await asyncio.gather(*(ask(client) for _ in range(4)))
                gone = (await client.delete("/v1/documents/academy.md")).json()
                assert gone["documents"] == 1
                for _ in range(4):
                    assert "academy.md#1" not in read_of(await ask(client))
        finally:
            done.set()
            thread.join()
        await asyncio.to_thread(within, 2, lambda: not held(own, "academy.md"))


# OpenAI's client


@pytest.fixture
def client(
    own: WindowedLM, index: Index, listening: Callable[[FastAPI], str]
) -> Iterator[openai.OpenAI]:
    """OpenAI's client of a server with the index."""
    base = listening(create_app(own, Settings(), index))
    with openai.OpenAI(base_url=f"{base}/v1", api_key="any", max_retries=0) as made:
        yield made


def test_openai_files(client: openai.OpenAI, index: Index) -> None:
    made = client.files.create(file=("notes/boat.md", b"Zelwick has a boat."), purpose="user_data")
    assert (made.filename, made.status, made.bytes) == ("boat.md", "processed", 19)
    assert [one.filename for one in client.files.list()] == ["academy.md", "river.md", "boat.md"]
    assert [one.filename for one in client.files.list(limit=1)] == [
        "academy.md",
        "river.md",
        "boat.md",
    ]
    assert client.files.retrieve(made.id) == made
    assert client.files.content(made.id).text == "Zelwick has a boat."
    assert client.files.wait_for_processing(made.id).id == made.id
    again = client.files.create(file=("boat.md", b"The boat sank."), purpose="assistants")
    assert again.id == made.id
    deleted = client.files.delete(made.id)
    assert (deleted.id, deleted.deleted) == (made.id, True)
    for call in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError):
            call(made.id)
    with pytest.raises(openai.BadRequestError, match="purpose"):
        client.files.create(file=("a.md", b"A."), purpose="batch")
    rest: Any = {"anchor": "created_at", "seconds": 3600}
    with pytest.raises(openai.BadRequestError, match="expires_after"):
        client.files.create(
            file=("a.md", b"A."),
            purpose="assistants",
            expires_after=rest,
        )
    with pytest.raises(openai.BadRequestError, match="order"):
        client.files.list(order="desc")
    assert not index.documents("a.md")


def test_openai_vector_stores(client: openai.OpenAI, index: Index) -> None:
    (store,) = client.vector_stores.list()
    assert client.vector_stores.retrieve(store.id) == store
    assert (store.id, store.status, store.file_counts.total) == ("vs_documents", "completed", 2)
    put = client.vector_stores.files.upload_and_poll(
        vector_store_id=store.id, file=("rows.jsonl", b'{"id": "r", "text": "Zelwick rows."}')
    )
    assert put.status == "completed"
    listed = [one.id for one in client.vector_stores.files.list(store.id)]
    assert listed[-1] == put.id
    assert client.vector_stores.files.retrieve(put.id, vector_store_id=store.id) == put
    hits = [*client.vector_stores.search(store.id, query="Who makes cheese?", max_num_results=2)]
    assert (hits[0].filename, hits[0].content[0].text) == (
        "academy.md",
        "Zelwick Academy makes cheese.",
    )
    assert hits[0].score > 0
    assert client.files.retrieve(hits[0].file_id).filename == "academy.md"
    gone = client.vector_stores.files.delete(put.id, vector_store_id=store.id)
    assert gone.deleted
    assert not index.documents("r")
    for call, named in (
        (lambda: client.vector_stores.create(name="two"), "vs_documents"),
        (lambda: client.vector_stores.update(store.id, name="two"), "fixed"),
        (lambda: client.vector_stores.delete(store.id), "Delete its files"),
        (lambda: client.vector_stores.search(store.id, query="a", max_num_results=65), "64"),
        (
            lambda: client.vector_stores.search(
                store.id, query="a", filters={"type": "eq", "key": "a", "value": "b"}
            ),
            "filters",
        ),
        (
            lambda: client.vector_stores.files.create(
                store.id, file_id=listed[0], attributes={"a": "b"}
            ),
            "POST /v1/documents",
        ),
    ):
        with pytest.raises(openai.BadRequestError, match=named):
            call()
    with pytest.raises(openai.NotFoundError, match="vs_documents"):
        client.vector_stores.retrieve("vs_other")


async def test_who_may_ask_may_search(own: WindowedLM, index: Index) -> None:
    keys = Keys([("ada", ADA, False)])
    async with asking(create_app(own, Settings(), index, keys=keys)) as client:
        path, query = "/v1/vector_stores/vs_documents/search", {"query": "cheese"}
        assert (await client.post(path, json=query)).status_code == 401
        client.headers["Authorization"] = f"Bearer {ADA}"
        hits = (await client.post(path, json=query)).json()
        assert hits["data"][0]["filename"] == "academy.md"


async def test_the_lifespan_follows(own: WindowedLM, index: Index, docs: Path) -> None:
    app = create_app(own, Settings(), index, follow=[str(docs)])
    async with app.router.lifespan_context(app):
        await asyncio.sleep(0.6)
        (docs / "new.md").write_text("New.", encoding="utf-8")
        await asyncio.to_thread(within, 2, lambda: index.documents("new.md"))


async def test_an_id_that_spells_half_a_character_is_unknown(own: WindowedLM, index: Index) -> None:
    async with asking(create_app(own, Settings(), index)) as client:
        for path in ("files/file-7aCA", "files/file-7aCA/content", "documents/%ED%A0%80"):
            assert (await client.get(f"/v1/{path}")).status_code == 404, path
