"""What needs no cluster: the example's file, the deployments, the router's choice, late bodies."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from ray import serve
from ray.serve.schema import ServeDeploySchema
from starlette.responses import JSONResponse

from rag_windows import Passage, PassageCache, WindowedLM
from rag_windows_retrievers import BM25Retriever, Document, Index
from rag_windows_server import Settings, create_app
from rag_windows_server.errors import ApiError
from rag_windows_server.fleet import FleetOptions, app
from rag_windows_server.fleet.front import _Passing, _removed, _together
from rag_windows_server.fleet.reader import ACCEPTED, Reader, Relayed
from rag_windows_server.fleet.router import Router
from rag_windows_server.fleet.routing import RoutedQuestion, pack
from tests.test_repository import ROOT


def test_the_example_is_a_fleet() -> None:
    text = (ROOT / "examples" / "fleet.yaml").read_text(encoding="utf-8")
    (application,) = ServeDeploySchema.model_validate(yaml.safe_load(text)).applications
    assert application.import_path == "rag_windows_server.fleet:app"
    # Serve makes the builder's argument of what stands in the file by this type.
    assert inspect.signature(app).parameters["options"].annotation is FleetOptions
    options = FleetOptions.model_validate(application.args)
    assert options.shared == "s3://shelf/windows"
    assert app(options) is not None
    assert {one.name for one in application.deployments} == {"Reader", "Front"}


def test_readers_share_an_index(tmp_path: Path) -> None:
    Index(tmp_path).add(Document("Orn is a river.", "orn", named=True))
    options = FleetOptions(index=str(tmp_path))
    first, second = options.load_documents(), options.load_documents()
    assert isinstance(first, Index)
    assert isinstance(second, Index)
    first.remove("orn")
    assert second.retrieve("river") == []


def answer_of(status: int, **body: Any) -> tuple[str, JSONResponse]:
    return "reader", JSONResponse(body, status)


def test_a_document_that_another_reader_removed_first() -> None:
    gone = {"object": "document.deleted", "id": "a"}
    missing = answer_of(404, error={"code": "document_not_found"})
    first = answer_of(200, **gone, documents=1, passages=3, windows=3)
    second = answer_of(200, **gone, documents=0, passages=0, windows=2)
    told = json.loads(bytes(_together([missing, first, second], _removed).body))
    assert (told["documents"], told["passages"], told["windows"]) == (1, 3, 5)
    assert _together([missing, missing], _removed).status_code == 404
    # A store that can't be reached is no success.
    assert _together([first, answer_of(503)], _removed).status_code == 503


@pytest.fixture
def deployments(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What Serve is asked for, by the deployments' names."""
    asked: dict[str, Any] = {}
    make: Any = serve.deployment

    def noting(kind: type, **given: Any) -> Any:
        asked[given["name"]] = given
        return make(kind, **given)

    monkeypatch.setattr(serve, "deployment", noting)
    return asked


def test_readers_are_started_as_questions_come_in(deployments: dict[str, Any]) -> None:
    settings = Settings(max_rows=4, timeout_s=100, wait_s=10)
    app(FleetOptions(replicas=2, max_replicas=5, gpus_per_replica=0.5, settings=settings))
    reader = deployments["Reader"]
    assert reader["autoscaling_config"] == {
        "min_replicas": 2,
        "max_replicas": 5,
        "target_ongoing_requests": 4,
    }
    assert "num_replicas" not in reader
    assert reader["ray_actor_options"] == {"num_cpus": 1, "num_gpus": 0.5}
    assert all(one["graceful_shutdown_timeout_s"] > 110 for one in deployments.values())
    app(FleetOptions(replicas=2))
    assert deployments["Reader"]["num_replicas"] == 2
    assert "autoscaling_config" not in deployments["Reader"]


def test_fewer_readers_at_most_than_at_least() -> None:
    with pytest.raises(ValueError, match="at least replicas=3, not 2"):
        FleetOptions(replicas=3, max_replicas=2)


def test_a_fleet_without_a_cache() -> None:
    assert FleetOptions(cache_memory=None).load_cache() is None
    cache = FleetOptions(cache_memory=None, shared="memory://shelf").load_cache()
    assert cache is not None
    assert (cache.memory, cache.disk) == (None, None)
    assert cache.shared is not None


def replica(name: str, held: set[int]) -> Any:
    """What Serve tells a router of a reader."""
    stats = {"held": pack(held)}
    return SimpleNamespace(
        replica_id=SimpleIdentity(name), routing_stats=stats, max_ongoing_requests=100
    )


class SimpleIdentity(str):
    """An id of a replica."""

    @property
    def unique_id(self) -> str:
        return str(self)


async def test_nobody_waits_or_is_refused_while_a_reader_is_free() -> None:
    router: Any = Router.__new__(Router)
    router.initialize_state(rows=3, full=5)
    loads = {SimpleIdentity("a"): 0, SimpleIdentity("b"): 2, SimpleIdentity("c"): 0}
    router._replica_queue_len_cache = loads
    replicas = [replica("a", set()), replica("b", {7, 8}), replica("c", {8})]
    pending = SimpleNamespace(
        kwargs={"question": RoutedQuestion((7, 8), (1000, 1000), 0)},
        metadata=SimpleNamespace(internal_request_id="1"),
        routing_context=SimpleNamespace(should_backoff=False),
    )

    async def order() -> list[str]:
        ranked = await router.choose_replicas(replicas, pending)
        return [str(one.replica_id) for (one,) in ranked]

    assert await order() == ["b", "c", "a"]
    loads[SimpleIdentity("b")] = 3
    assert await order() == ["c", "a", "b"]
    loads |= {SimpleIdentity("a"): 3, SimpleIdentity("c"): 5}
    assert await order() == ["b", "a", "c"]
    # What a question has brought a reader counts before it is published.
    loads |= dict.fromkeys(loads, 0)
    pending.kwargs = {"question": RoutedQuestion((9,), (1000,), 0)}
    router.on_request_routed(pending, SimpleIdentity("a"), None)
    assert (await order())[0] == "a"
    # What is no question goes to the least busy one.
    loads |= {SimpleIdentity("a"): 2, SimpleIdentity("b"): 1}
    pending.kwargs = {}
    assert await order() == ["c", "b", "a"]


def reading(settings: Settings, retriever: BM25Retriever | None = None) -> Any:
    """A reader outside of any cluster."""
    lm = WindowedLM.from_pretrained("tiny-reader", cache=PassageCache("1MiB"), device_map="cpu")
    reader: Any = Reader.__new__(Reader)
    reader.name, reader._failed, reader._lm = "one", False, lm
    reader._app = create_app(lm, settings, retriever)
    return reader


SCOPE: dict[str, Any] = {
    "type": "http",
    "method": "POST",
    "path": "/v1/chat/completions",
    "headers": [(b"content-type", b"application/json"), (b"x-request-id", b"one\ntwo")],
    "query_string": b"",
    "root_path": "",
    "asgi": {"version": "3.0"},
}


async def test_the_server_itself_refuses_what_a_front_could_not_read() -> None:
    reader = reading(Settings(most_body_bytes=10, idle_s=1))
    for relayed, status, code in (
        (Relayed(SCOPE, b"{", late=True), 408, "timeout"),
        (Relayed(SCOPE, b"{" * 11), 413, "body_too_large"),
    ):
        name, messages = await reader.whole(relayed)
        assert (name, messages[0]["status"]) == ("one", status)
        assert json.loads(messages[1]["body"])["error"]["code"] == code
        told = dict(messages[0]["headers"])[b"x-request-id"]
        assert b"\n" not in told


START: dict[str, Any] = {
    "type": "http.response.start",
    "status": 200,
    "headers": [(b"content-type", b"text/event-stream; charset=utf-8")],
}


def piece(text: str, more: bool = True) -> dict[str, Any]:
    return {"type": "http.response.body", "body": text.encode(), "more_body": more}


def refusal(status: int, error: ApiError) -> list[dict[str, Any]]:
    head = {"type": "http.response.start", "status": status, "headers": []}
    return [head, piece(bytes(error.response().body).decode(), more=False)]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
async def test_a_failure_behind_the_status_is_an_event(path: str) -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        raise AssertionError

    error = ApiError(503, "Nobody is there.", type="server_error", code="unavailable")
    passing = _Passing(path, send)
    await passing.on([{"type": ACCEPTED, "name": "one"}])
    assert not passing.begun
    await passing.on([START, piece(": ping\n\n")])
    assert passing.begun
    assert (b"x-reader", b"one") in sent[0]["headers"]
    await passing.end(error, {"type": "http"}, receive)
    text = sent[-1]["body"].decode()
    assert not sent[-1].get("more_body", False)
    told = json.loads(text.split("data: ")[1].split("\n")[0])
    assert told["error"] == error.error
    if path == "/v1/responses":
        assert text.startswith("event: error\n")
        assert (told["type"], told["sequence_number"]) == ("error", 0)


async def test_a_refusal_has_its_status() -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    error = ApiError(429, "Too many.")
    passing = _Passing("/v1/responses", send)
    await passing.on([{"type": ACCEPTED, "name": "one"}, *refusal(429, error)])
    assert [one.get("status") for one in sent] == [429, None]


async def test_a_new_reader_learns_what_was_deleted() -> None:
    texts = ("Zelwick makes cheese.", "Zelwick lies in Sulava.")
    own = BM25Retriever([Passage(text, id=f"z#{i}") for i, text in enumerate(texts, 1)])
    reader = reading(Settings(), own)
    given = {"model": "tiny-reader", "messages": [{"role": "user", "content": "Zelwick?"}]}
    found = []
    for deleted in (frozenset[str](), frozenset({"z#2"}), frozenset({"z"})):
        relayed = Relayed(SCOPE, json.dumps(given).encode(), deleted=deleted)
        _, messages = await reader.whole(relayed)
        answer = json.loads(messages[1]["body"])
        found.append([one["id"] for one in answer["choices"][0]["message"]["citations"]])
    assert found == [["z#1", "z#2"], ["z#1"], []]


async def test_a_reader_whose_model_fails_is_not_healthy() -> None:
    class Failing:
        cache = None

        def generate(self, *_: Any, **__: Any) -> None:
            raise RuntimeError("CUDA error: device-side assert triggered")

    reader: Any = Reader.__new__(Reader)
    reader._lm, reader._failed = Failing(), False
    await reader.check_health()
    reader._failed = True
    with pytest.raises(RuntimeError, match="device-side"):
        await reader.check_health()
