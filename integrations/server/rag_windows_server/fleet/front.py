"""The front: takes requests over HTTP, passes each on to a reader, and its answer back."""

# No `from __future__ import annotations`: Serve reads the type of the builder's argument from it.
import asyncio
import json
import logging
import re
import signal
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from ray import serve
from ray.exceptions import ActorDiedError, RayError, RayTaskError
from ray.serve import Application
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rag_windows import InputError, Passage, RagWindowsError
from rag_windows_server import chat, responses
from rag_windows_server.answering import searched
from rag_windows_server.bodies import Body, top_k
from rag_windows_server.chat import ChatBody
from rag_windows_server.collection import index_of
from rag_windows_server.errors import ApiError, busy, error_event, internal, log_failure
from rag_windows_server.fleet.cluster import cluster
from rag_windows_server.fleet.options import FleetOptions
from rag_windows_server.fleet.reader import ACCEPTED, Reader, Relayed
from rag_windows_server.fleet.router import PUBLISH_S, Router
from rag_windows_server.fleet.routing import RoutedQuestion, home_of, passage_number
from rag_windows_server.keys import Tenant
from rag_windows_server.own_documents import document_removed
from rag_windows_server.passages import deleted
from rag_windows_server.process import free_port, unavailable
from rag_windows_server.responses import ResponsesBody
from rag_windows_server.routes import read_body

_log = logging.getLogger("rag_windows.fleet")

_TRIES = 3
"""Readers that are asked one after the other, because each of them died."""

_SCOPE = "type asgi http_version method scheme path raw_path query_string root_path headers client"
"""Keys of a request's scope that a reader gets; the rest belongs to Serve's own handling."""

_REMOVING = ("/v1/passages/", "/v1/documents/", "/v1/files/", "/v1/vector_stores/")
"""Paths whose DELETE goes to all readers, for each has windows of its own."""

_ASKING: dict[str, tuple[type[Body], Callable[..., tuple[list[dict[str, Any]], list[Passage]]]]] = {
    "/v1/chat/completions": (ChatBody, chat.conversation),
    "/v1/responses": (ResponsesBody, responses.conversation),
}


class Front:
    """Passes requests on to readers; these parse, answer, refuse and count.

    A question whose reader dies is asked again elsewhere while nothing was passed to the client;
    else its stream ends with an error. A client that leaves ends the work of the reader.

    Args:
        readers: handle of the readers' deployment.
        options: of the fleet.
    """

    def __init__(self, readers: DeploymentHandle[Reader], options: FleetOptions) -> None:
        self._settings = options.settings
        self._keys = options.load_keys()
        self._documents = options.load_documents()
        self._readers = readers
        self._ask = readers.options(method_name="answer", stream=True)
        self._lasting = index_of(self._documents) is not None
        # Without an index a reader that starts later reads all documents again.
        self._deleted: frozenset[str] = frozenset()

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """What Serve runs for each request."""

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "lifespan":
                for stage in ("startup", "shutdown"):
                    await receive()
                    await send({"type": f"lifespan.{stage}.complete"})
            elif scope["type"] == "http":
                await self._answer(scope, receive, send)
            else:
                await send({"type": "websocket.close"})

        return app

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        tenant = self._tenant(scope)
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        fields = {name: scope[name] for name in _SCOPE.split() if name in scope}
        # Who may not ask is refused by a reader, before anybody waits for a body.
        body, late = (b"", False) if tenant is None else await self._body(receive)
        if body is None:
            return
        relayed = Relayed({**fields, "headers": [*scope["headers"]]}, body, late, self._deleted)
        together = None
        if tenant is not None and tenant.operator:
            if scope["method"] == "GET" and path == "/metrics":
                together = _metrics
            elif scope["method"] == "DELETE" and path.startswith(_REMOVING):
                together = _removed
                if not self._lasting and path.startswith("/v1/passages/"):
                    self._deleted |= {path.removeprefix("/v1/passages/")}
        if together is None:
            question = await asyncio.to_thread(self._question, path, body, tenant)
            await self._pass_on(relayed, question, receive, send)
            return
        try:
            answers = await self._everywhere(relayed)
        except ApiError as error:
            response: Response = error.response()
        else:
            response = _together(answers, together)
        await response(scope, receive, send)

    def _tenant(self, scope: Scope) -> Tenant | None:
        found = [value for name, value in scope["headers"] if name == b"authorization"]
        try:
            return self._keys.tenant(found[0].decode("latin-1") if found else None)
        except ApiError:
            return None

    async def _body(self, receive: Receive) -> tuple[bytes | None, bool]:
        """The body, and whether the rest of it is late; None for a client that left.

        A body that is larger than readers take is passed on as soon as it is, for them to say so.
        """
        parts: list[bytes] = []
        size, more = 0, True
        while more and size <= self._settings.most_body_bytes:
            try:
                async with asyncio.timeout(self._settings.idle_s):
                    message = await receive()
            except TimeoutError:
                return b"".join(parts), True
            if message["type"] == "http.disconnect":
                return None, False
            parts.append(message.get("body", b""))
            size, more = size + len(parts[-1]), message.get("more_body", False)
        return b"".join(parts), False

    def _question(self, path: str, body: bytes, tenant: Tenant | None) -> RoutedQuestion | None:
        """Which passages a question reads; None for what is none, or what a reader will refuse."""
        if path not in _ASKING or tenant is None:
            return None
        kind, conversation = _ASKING[path]
        try:
            asked: Any = read_body(body, kind)
            messages, passages = conversation(asked, self._settings, tools=bool(asked.tools))
            k = top_k(asked, bool(passages), self._documents, self._settings)
            if k and self._documents is not None:
                passages = self._documents.retrieve(searched(messages), k)
        except (ApiError, RagWindowsError):
            return None
        said = (one["content"] for one in messages if one["role"] == "user")
        return RoutedQuestion(
            digests=tuple(passage_number(tenant.salt, one) for one in passages),
            sizes=tuple(len(one.text) for one in passages),
            # Of a conversation: its questions read much of the same, and all have its beginning.
            home=home_of(tenant.name, next(said, "")),
        )

    async def _pass_on(
        self, request: Relayed, question: RoutedQuestion | None, receive: Receive, send: Send
    ) -> None:
        passing = _Passing(request.scope["path"], send)
        for left in reversed(range(_TRIES)):
            answer: Any = self._ask.remote(request, question=question)
            try:
                async with asyncio.timeout(self._settings.wait_s):
                    await passing.on(await anext(answer))
                async for messages in answer:
                    await passing.on(messages)
                return
            except TimeoutError:
                message = f"No reader took it within {self._settings.wait_s:g} seconds. Try again."
                failed = busy(503, message, 5)
                break
            except DeploymentUnavailableError:
                failed = busy(503, "The fleet has no readers. Its log tells why.", 30)
                break
            except RayTaskError as error:
                log_failure(passing.reader, error)
                failed = internal()
                break
            except RayError as error:
                if passing.ended:
                    return
                _log.warning("Reader %s failed: %s", passing.reader, type(error).__name__)
                failed = busy(503, "The reader of this answer ended before it. Ask again.", 1)
                if passing.begun or not left:
                    break
            finally:
                answer.cancel()
        await passing.end(failed, request.scope, receive)

    async def _everywhere(self, request: Relayed) -> list[tuple[str, Response]]:
        """What all readers answer, each with its name.

        Raises:
            ApiError: one of them can't be reached.
        """
        asked = self._readers.broadcast("whole", request)
        try:
            found = await asked.results_async(
                timeout_s=self._settings.wait_s, return_exceptions=True
            )
            # What one that has died held is gone, and its counters are, too.
            answers = [one for one in found if not isinstance(one, ActorDiedError)]
            for one in answers:
                if isinstance(one, Exception):
                    raise one
        except (TimeoutError, RayError, DeploymentUnavailableError) as error:
            log_failure("A request to all readers", error)
            raise busy(503, "Not all readers could be reached. Try again.", 5) from error
        if not answers:
            raise busy(503, "No reader could be reached. Try again.", 5)
        return [(name, _response(messages)) for name, messages in answers]


class _Passing:
    """Passes one answer on to the client.

    Attributes:
        reader: that answers.
        begun, ended: whether the client has got anything of the answer, and all of it.
    """

    def __init__(self, path: str, send: Send) -> None:
        self._send = send
        self._numbered = path.endswith("/responses")
        self._streamed, self._events = False, 0
        self.reader = "(none)"
        self.begun = self.ended = False

    async def on(self, messages: Iterable[Message]) -> None:
        """Pass some messages on."""
        for message in messages:
            if message["type"] == ACCEPTED:
                self.reader = message["name"]
                continue
            if message["type"] == "http.response.start":
                # Serve's proxy adds the request's id, which is the reader's, too.
                headers = [one for one in message["headers"] if one[0].lower() != b"x-request-id"]
                self._streamed = any(b"text/event-stream" in value for _, value in headers)
                own = (b"x-reader", self.reader.encode())
                message = {**message, "headers": [*headers, own]}
            else:
                body = message.get("body", b"")
                self._events += bool(body) and not body.startswith(b":")
                self.ended = not message.get("more_body", False)
            self.begun = True
            await self._send(message)

    async def end(self, error: ApiError, scope: Scope, receive: Receive) -> None:
        """Report to the client why the answer ends."""
        if not self.begun:
            await error.response()(scope, receive, self._send)
        elif self._streamed:
            event = error_event(error, self._events if self._numbered else None)
            await self._send({"type": "http.response.body", "body": event.encode()})
        else:
            raise ConnectionError("The reader of this answer ended in its midst.")


Answers = Sequence[tuple[str, Response]]


def _response(messages: Sequence[Message]) -> Response:
    start = next(one for one in messages if one["type"] == "http.response.start")
    body = b"".join(one.get("body", b"") for one in messages)
    response = Response(body, start["status"])
    skipped = (b"x-request-id", b"content-length")
    response.raw_headers += [one for one in start["headers"] if one[0].lower() not in skipped]
    return response


def _together(answers: Answers, merged: Callable[[Answers], Response]) -> Response:
    """One answer for all readers' ones, or the first that refuses.

    Readers of one index find there what another one of them has left of it: of a document that one
    has removed just now the others know nothing any more.
    """
    good = [one for one in answers if one[1].status_code == 200]
    bad = [response for _, response in answers if response.status_code != 200]
    failed = [one for one in bad if one.status_code != 404 or not good]
    return failed[0] if failed else merged(good)


def _removed(answers: Answers) -> Response:
    """What all readers removed; a window that two of them held counts twice."""
    bodies = [json.loads(bytes(response.body)) for _, response in answers]
    first: dict[str, Any] = bodies[0]

    def most(name: str) -> int:
        # All readers have the same documents; another one may have removed these before.
        return max(one[name] for one in bodies)

    if first["object"] == "passages.deleted":
        windows = sum(one["deleted"] for one in bodies)
        first = deleted(first["id"], windows, most("passages"), lasting=first["lasting"])
    elif first["object"] == "document.deleted":
        windows = sum(one["windows"] for one in bodies)
        first = document_removed(first["id"], most("documents"), most("passages"), windows)
    return JSONResponse(first)


class _Families(Collector):
    """The metrics of all readers, with the reader's name at each sample."""

    def __init__(self, answers: Answers) -> None:
        self._families: dict[str, Metric] = {}
        for name, response in answers:
            for family in text_string_to_metric_families(bytes(response.body).decode()):
                empty = Metric(family.name, family.documentation, family.type)
                merged = self._families.setdefault(family.name, empty)
                merged.samples += [
                    one._replace(labels={**one.labels, "replica": name}) for one in family.samples
                ]

    def collect(self) -> Iterable[Metric]:
        """All of them."""
        return self._families.values()


def _metrics(answers: Answers) -> Response:
    registry = CollectorRegistry()
    registry.register(_Families(answers))
    media_type = "text/plain; version=0.0.4; charset=utf-8"
    return Response(generate_latest(registry), media_type=media_type)


def app(options: FleetOptions) -> Application:
    """The application of a fleet: ``serve run rag_windows_server.fleet:app model=... replicas=3``.

    In a config file of Ray Serve its ``args`` are those of `FleetOptions`.
    """
    settings = options.settings
    together = settings.max_rows + settings.most_waiting
    size: dict[str, Any] = {"num_replicas": options.replicas}
    if options.max_replicas is not None:
        size = {
            "autoscaling_config": {
                "min_replicas": options.replicas,
                "max_replicas": options.max_replicas,
                "target_ongoing_requests": settings.max_rows,
            }
        }
    # A replica that is replaced answers what it has, however long that may take.
    ending: dict[str, Any] = {
        "graceful_shutdown_timeout_s": (settings.timeout_s or 3600) + settings.wait_s + 60,
        "graceful_shutdown_wait_loop_s": 0.5,
    }
    readers: Any = serve.deployment(
        Reader,
        name="Reader",
        ray_actor_options={
            "num_cpus": options.cpus_per_replica,
            "num_gpus": options.gpus_per_replica,
        },
        # More than a reader's own line takes, so that it is the reader who refuses.
        max_ongoing_requests=2 * together,
        max_constructor_retry_count=3,
        health_check_timeout_s=120,
        request_router_config={
            "request_router_class": f"{Router.__module__}.{Router.__name__}",
            "request_router_kwargs": {"rows": settings.max_rows, "full": together},
            "request_routing_stats_period_s": PUBLISH_S,
        },
        **size,
        **ending,
    )
    fronts: Any = serve.deployment(
        serve.ingress()(Front),
        name="Front",
        num_replicas=options.fronts,
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=4 * together * (options.max_replicas or options.replicas),
        **ending,
    )
    bound: Application = fronts.bind(readers.bind(options), options)
    return bound


def _cause() -> str:
    """Why readers did not start, from the tracebacks that Serve stores."""
    deployments = serve.status().applications[NAME].deployments.values()
    said = "\n".join(one.message for one in deployments)
    own = re.findall(r"^rag_windows\.errors\.\w+: (.+)$", said, re.MULTILINE)
    return own[-1] if own else "The readers did not start. The log above tells why."


NAME = "rag-windows"
"""Of the application, where `run` starts it."""


def run(
    options: FleetOptions,
    host: str = "127.0.0.1",
    port: int = 8000,
    *,
    address: str | None = None,
    grace_s: float = 5.0,
    on_ready: Callable[[str], None] = lambda at: None,
) -> None:
    """Serve a fleet until a signal stops the process.

    Then waiting questions are refused, and answers in progress get some seconds.

    Args:
        address: of a cluster of Ray's; None starts one on this machine, which ends with it.
        on_ready: called with " on http://..." when the readers are ready.

    Raises:
        InputError: nobody can listen there, or the readers do not start.
    """
    if address is None or not port:
        port = free_port(host, port)
    count, cpus = options.max_replicas or options.replicas, options.cpus_per_replica
    with cluster(address, count, cpus, show_logs=True):
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        try:
            _serve(options, host, port, "EveryNode" if address else "HeadOnly")
            on_ready(f" on http://{f'[{host}]' if ':' in host else host}:{port}")
            _wait()
            readers: Any = serve.get_deployment_handle("Reader", NAME)
            with suppress(RayError, DeploymentUnavailableError):
                readers.broadcast("stop", grace_s).results(return_exceptions=True)
            serve.delete(NAME)
        finally:
            if address is None:
                serve.shutdown()


def _serve(options: FleetOptions, host: str, port: int, proxies: str) -> None:
    quiet: Any = {"log_level": "WARNING", "enable_access_log": False}
    try:
        serve.start(
            http_options={"host": host, "port": port},
            proxy_location=proxies,
            logging_config=quiet,
        )
    except (RuntimeError, RayError) as error:  # somebody else took the port meanwhile
        raise unavailable(host, port) from error
    try:
        serve.run(app(options), name=NAME, logging_config=quiet)
    except RuntimeError as error:
        raise InputError(_cause()) from error


def _wait() -> None:
    """Wait for a signal that stops the process."""
    stopped = threading.Event()
    before = [
        (number, signal.signal(number, lambda *_: stopped.set()))
        for number in (signal.SIGINT, signal.SIGTERM)
    ]
    # A signal that comes just before a wait doesn't end it: so no wait is long.
    while not stopped.wait(1):
        pass
    for number, handler in before:
        signal.signal(number, handler)
