"""The application: routes, who may ask from where, what is logged, start and end."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Iterable
from contextlib import asynccontextmanager

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rag_windows import InputError, RagWindowsError, WindowedLM, __version__
from rag_windows.integration import describe, one_line
from rag_windows_server import chat, files, own_documents, page, passages, responses
from rag_windows_server.answering import Answering, ClientLeft, PassageRetriever
from rag_windows_server.errors import ApiError, answered, internal, log_failure
from rag_windows_server.keys import Keys
from rag_windows_server.metrics import Metrics
from rag_windows_server.routes import Served
from rag_windows_server.settings import Settings

_log = logging.getLogger("rag_windows.server")


def create_app(
    lm: WindowedLM,
    settings: Settings | None = None,
    documents: PassageRetriever | None = None,
    *,
    keys: Keys | None = None,
    follow: Iterable[str] = (),
) -> FastAPI:
    """The ASGI application that answers with a model.

    Args:
        lm: the model, with its passage cache.
        settings: what requests may ask for.
        documents: what finds passages for requests that bring none: a retriever, such as
            `rag_windows_retrievers.BM25Retriever`. Documents of an `rag_windows_retrievers.Index`
            may change while the server runs.
        keys: who may ask; None lets everybody.
        follow: files, folders and patterns that the index follows from the start on.

    Raises:
        InputError: the model has no tokenizer, or nothing follows the files.
    """
    settings, keys = settings or Settings(), keys or Keys()
    if settings.default_system is not None:
        own = lm.behind_own_system(settings.default_system)
        settings = settings.model_copy(update={"default_system": own})
    if lm.tokenizer is None:
        raise InputError("The server needs a model with a tokenizer. Give one as tokenizer=.")
    metrics = Metrics()
    named = json.dumps([settings.model_name, describe(lm.method), __version__], sort_keys=True)
    served = Served(
        lm=lm,
        settings=settings,
        keys=keys,
        metrics=metrics,
        answering=Answering(lm, settings, keys.tenants, documents, metrics),
        created=int(time.time()),
        fingerprint="rw_" + hashlib.sha256(named.encode()).hexdigest()[:12],
    )

    collection, paths = served.answering.collection, [*follow]
    if collection is not None:
        metrics.hold(collection)
    elif paths:
        raise InputError("Documents that change need an index. Give create_app an Index.")

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncGenerator[None]:
        if collection is not None:
            await asyncio.to_thread(collection.start, paths)
        try:
            yield
        finally:
            served.answering.close()
            if collection is not None:
                await asyncio.to_thread(collection.close)

    app = FastAPI(
        title="rag-windows",
        version=__version__,
        summary="OpenAI's routes, with documents in and citations out.",
        lifespan=lifespan,
        # Its pages would run scripts of other hosts; /openapi.json has all routes.
        docs_url=None,
        redoc_url=None,
        # A proxy may speak https and have another name: nobody is sent to an address of ours.
        redirect_slashes=False,
    )
    app.state.served = served
    for part in (chat, responses, own_documents, files, passages, page):
        app.include_router(part.routes(served))
    app.include_router(_routes(served))
    for kind in (ApiError, RagWindowsError, HTTPException, RequestValidationError, ClientLeft):
        app.add_exception_handler(kind, _answer_error)
    if settings.cors:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.cors),
            allow_methods=["GET", "HEAD", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        )
    app.add_middleware(_Logged, served=served)
    return app


def _routes(served: Served) -> APIRouter:
    router = APIRouter(tags=["server"])

    @router.get("/health", summary="Whether the process answers")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @router.get("/ready", summary="Whether new questions are taken", response_model=None)
    async def ready() -> Response:
        stopping = served.answering.line.closed
        report = {"status": "stopping" if stopping else "ready"}
        return JSONResponse(report, 503 if stopping else 200)

    @router.get("/v1/models", summary="The model that answers")
    async def models(request: Request) -> dict[str, object]:
        served.tenant(request)
        return {"object": "list", "data": [_model(served)]}

    @router.get("/v1/models/{name:path}", summary="The same, by its name")
    async def model(name: str, request: Request) -> dict[str, object]:
        served.tenant(request)
        if not served.settings.serves(name):
            message = f"The model {name!r:.100} is not served here; see GET /v1/models."
            raise ApiError(404, message, param="model", code="model_not_found")
        return _model(served)

    @router.get("/metrics", summary="Counters in Prometheus' text format", response_model=None)
    async def metrics(request: Request) -> Response:
        served.operator(request)
        text = await asyncio.to_thread(served.metrics.text, served.lm.cache)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    return router


def _model(served: Served) -> dict[str, object]:
    return {
        "id": served.settings.model_name,
        "object": "model",
        "created": served.created,
        "owned_by": "rag-windows",
    }


async def _answer_error(request: Request, error: Exception) -> Response:
    if isinstance(error, ClientLeft):
        return Response(status_code=499)
    if isinstance(error, RequestValidationError):
        first = error.errors()[0]
        param = str(first["loc"][-1])
        message = f"{param}: {first['msg']}."
        return ApiError(400, message, param=param, code="invalid_value").response()
    if isinstance(error, HTTPException):
        message = f"{request.method} {request.url.path}: {error.detail}."
        code = "not_found" if error.status_code == 404 else None
        return ApiError(error.status_code, message, code=code, headers=error.headers).response()
    return answered(error, request.state.request_id).response()


def _path(scope: Scope) -> str:
    """The path of a request without a slash at its end, but for ids, which may end in one."""
    path: str = scope["path"]
    return path if scope["method"] == "DELETE" else path.rstrip("/") or "/"


def _host(header: str) -> str:
    """The name in a Host header, without the port."""
    name, colon, port = header.rpartition(":")
    return (name if colon and port.isdecimal() else header).lower()


class _Logged:
    """Gives each request an id, counts it, and logs a line about it, without its texts."""

    def __init__(self, app: ASGIApp, served: Served) -> None:
        self._app, self._served = app, served

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun, status = time.perf_counter(), 0
        state = scope.setdefault("state", {})
        # A front that passes requests on to several servers has named this one already.
        request_id = state.setdefault("request_id", f"req_{secrets.token_hex(12)}")

        # A HEAD request gets the headers of GET, and no body.
        head_only = scope["method"] == "HEAD"
        asked = {**scope, "path": _path(scope), "method": "GET" if head_only else scope["method"]}

        async def tell(message: Message) -> None:
            nonlocal status
            if head_only and message["type"] == "http.response.body":
                message = {**message, "body": b""}
            if message["type"] == "http.response.start":
                status = message["status"]
                own = (b"x-request-id", request_id.encode())
                message = {**message, "headers": [*message.get("headers", ()), own]}
            await send(message)

        try:
            hosts = self._served.settings.hosts
            if hosts and _host(Headers(scope=scope).get("host", "")) not in hosts:
                message = "This server does not answer under this name. Its operator can allow it."
                await ApiError(421, message, code="unknown_host").response()(asked, receive, tell)
            else:
                await self._app(asked, receive, tell)
        except Exception as error:  # noqa: BLE001 - for the client and the log, without texts
            log_failure(request_id, error)
            if not status:
                await internal().response()(asked, receive, tell)
        finally:
            route = getattr(asked.get("route"), "path", "other")
            self._served.metrics.request(route, status or 499)
            _log.info(
                "%s %s %s %s %.3fs%s",
                request_id,
                scope["method"],
                one_line(scope["path"])[:100],
                status or "left",
                time.perf_counter() - begun,
                f" user={one_line(state['user'])[:64]}" if state.get("user") else "",
            )
