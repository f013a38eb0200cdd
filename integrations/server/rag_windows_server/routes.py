"""What all routes share: who asks, the body, answers whole and streamed."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from fastapi import Request, Response
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, ValidationError
from pydantic_core import from_json
from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive, Scope, Send

from rag_windows import WindowedLM
from rag_windows_server.answering import (
    Answering,
    ClientLeft,
    ServedAnswer,
    StreamPiece,
    until_left,
)
from rag_windows_server.bodies import Body, ServerRequest
from rag_windows_server.collection import Collection
from rag_windows_server.errors import ApiError, answered, error_event, malformed
from rag_windows_server.keys import Keys, Tenant
from rag_windows_server.metrics import Metrics
from rag_windows_server.settings import Settings

B = TypeVar("B", bound=BaseModel)


class AnswerShape(Protocol):
    """How the answers to one request look on its route."""

    def whole(self, answers: Sequence[ServedAnswer], /) -> BaseModel:
        """All answers at once."""

    def stream(self, pieces: AsyncGenerator[StreamPiece, None], /) -> AsyncGenerator[str, None]:
        """The events of a stream."""


@dataclass(frozen=True, kw_only=True)
class Served:
    """What the routes of one server answer with.

    Attributes:
        created: when it started, in seconds since 1970.
        fingerprint: of the model and its method, as answers state it.
    """

    lm: WindowedLM
    settings: Settings
    keys: Keys
    metrics: Metrics
    answering: Answering
    created: int
    fingerprint: str

    def tenant(self, request: Request) -> Tenant:
        """Who asks; ApiError 401 without a known key."""
        return self.keys.tenant(request.headers.get("authorization"))

    def operator(self, request: Request) -> Tenant:
        """The tenant, who must be an operator; else ApiError 403."""
        tenant = self.tenant(request)
        if not tenant.operator:
            message = "This route is for operators; this key is none of theirs."
            raise ApiError(403, message, type="permission_error", code="operators_only")
        return tenant

    def collection(self) -> Collection:
        """The server's own documents; ApiError 409 where they can't change."""
        found = self.answering.collection
        if found is None:
            message = (
                "This server has no index whose documents can change. Start it with --docs and "
                "without --no-cache, or give create_app an Index."
            )
            raise ApiError(409, message, code="no_index")
        return found

    async def body(self, request: Request, kind: type[B]) -> B:
        """A request's body, checked; a `Body` names the model, which must be this one.

        Raises:
            ApiError: it is too large, no JSON, or has fields that are refused.
        """
        read = await asyncio.to_thread(read_body, await self.json_text(request), kind)
        if isinstance(read, Body) and not self.settings.serves(read.model):
            message = f"The model {read.model!r:.100} is not served here; see GET /v1/models."
            raise ApiError(404, message, param="model", code="model_not_found")
        return read

    async def json_text(self, request: Request) -> bytes:
        """A request's body, which must be JSON by its header; see `raw`."""
        if not request.headers.get("content-type", "").lower().startswith("application/json"):
            message = "The body must be JSON. Send the header Content-Type: application/json."
            raise ApiError(415, message, code="unsupported_media_type")
        return await self.raw(request)

    async def raw(self, request: Request) -> bytes:
        """A request's body as it came.

        Raises:
            ApiError: it is too large, or too late.
        """
        most, parts, size = self.settings.most_body_bytes, [], 0
        coming, idle_s = request.stream(), self.settings.idle_s
        while True:
            try:
                async with asyncio.timeout(idle_s):
                    part = await anext(coming, None)
            except TimeoutError as error:
                message = f"The rest of the body did not come within {idle_s:g} seconds."
                headers = {"Connection": "close"}
                raise ApiError(408, message, code="timeout", headers=headers) from error
            except ClientDisconnect as error:
                raise ClientLeft from error
            if part is None:
                break
            size += len(part)
            if size > most:
                message = f"The body is larger than {most} bytes, the most that this server takes."
                raise ApiError(413, message, code="body_too_large")
            parts.append(part)
        return b"".join(parts)

    async def answered(
        self,
        request: Request,
        kind: type[B],
        read: Callable[[B, Served], ServerRequest],
        shape: Callable[[B, ServerRequest, str], AnswerShape],
    ) -> Response:
        """Answer a request of either route, whole or as a stream.

        Args:
            kind: of the body.
            read: the question that a body asks.
            shape: how its answers look; the text is the request's id.
        """
        tenant = self.tenant(request)
        body: Any = await self.body(request, kind)
        question = await asyncio.to_thread(read, body, self)
        request.state.user = question.user  # for the log
        made = shape(body, question, request.state.request_id)
        if body.stream:
            pieces = self.answering.stream(question, tenant)
            return await Stream.begun(request, pieces, made.stream)
        answers = await until_left(request, self.answering.answer(question, tenant))
        return self.json(made.whole(answers))

    def json(self, answer: BaseModel) -> Response:
        """An answer of openai's types, with what we add."""
        return Response(_json(answer), media_type="application/json")


def read_body(text: bytes, kind: type[B]) -> B:
    """A body out of its JSON; ApiError where something is wrong with it."""
    try:
        given = from_json(text, allow_inf_nan=False)
    except ValueError as error:
        message = f"The body is no JSON: {error}"
        raise ApiError(400, message, code="invalid_json") from error
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        raise malformed(error) from error


_PING = ": ping\n\n"
"""A comment, which clients skip."""


class Stream(StreamingResponse):
    """Server-sent events; when they end for any reason, the work behind them ends, too."""

    media_type = "text/event-stream"

    @classmethod
    async def begun(
        cls,
        request: Request,
        pieces: AsyncGenerator[StreamPiece, None],
        shape: Callable[[AsyncGenerator[StreamPiece, None]], AsyncGenerator[str, None]],
    ) -> Stream:
        """A stream whose question was checked, so that errors before it have their own status.

        The status does not wait for the first text, which may take minutes, nor long for a turn in
        line; an error after it is an event.
        """
        settings: Settings = request.app.state.served.settings
        first = asyncio.ensure_future(anext(pieces))
        try:
            await until_left(request, asyncio.wait({first}, timeout=settings.ping_s))
            if first.done():
                first.result()
        except BaseException:
            await _ended(first)
            await pieces.aclose()
            raise

        async def written() -> AsyncGenerator[StreamPiece, None]:
            piece: StreamPiece | None = await first
            while piece is not None:
                if piece.text or piece.reasoning or piece.answered is not None:
                    yield piece
                piece = await anext(pieces, None)

        async def events() -> AsyncGenerator[str | None, None]:
            try:
                async for one in shape(written()):
                    yield one
            except Exception as error:  # noqa: BLE001 - reported to the client, and logged
                yield error_event(answered(error, request.state.request_id))

        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        return cls(settings, first, events(), pieces, headers)

    def __init__(
        self,
        settings: Settings,
        first: asyncio.Future[StreamPiece],
        events: AsyncGenerator[str | None, None],
        pieces: AsyncGenerator[StreamPiece, None],
        headers: Mapping[str, str],
    ) -> None:
        super().__init__(self._pinged(), headers=headers)
        self._settings, self._events, self._pieces = settings, events, pieces
        self._coming: asyncio.Future[Any] = first

    async def _pinged(self) -> AsyncGenerator[str, None]:
        """The events, and a comment wherever none comes for long."""
        while True:
            self._coming = asyncio.ensure_future(anext(self._events, None))
            while not (await asyncio.wait({self._coming}, timeout=self._settings.ping_s))[0]:
                yield _PING
            event = self._coming.result()
            if event is None:
                return
            yield event

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream; a client that stops reading loses its turn."""

        async def send_in_time(message: Message) -> None:
            async with asyncio.timeout(self._settings.idle_s):
                await send(message)

        try:
            with suppress(TimeoutError, ClientDisconnect):
                await super().__call__(scope, receive, send_in_time)
        finally:
            # The work in the generators must have ended before they can be closed.
            await _ended(self._coming)
            await self._events.aclose()
            await self._pieces.aclose()


async def _ended(work: asyncio.Future[Any]) -> None:
    work.cancel()
    await asyncio.gather(work, return_exceptions=True)


def event(data: BaseModel, name: str | None = None) -> str:
    """A server-sent event with this as its JSON."""
    head = "" if name is None else f"event: {name}\n"
    return f"{head}data: {_json(data)}\n\n"


def _json(data: BaseModel) -> str:
    # A part whose type is narrower than the field's is written as what it is.
    return data.model_dump_json(by_alias=True, exclude_unset=True, serialize_as_any=True)


def new_id(kind: str) -> str:
    """A unique name: ``chatcmpl-...``."""
    return f"{kind}-{secrets.token_hex(12)}"


def body_schema(kind: type[BaseModel]) -> dict[str, Any]:
    """OpenAPI's description of a body that a route reads by itself."""
    schema = kind.model_json_schema()
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
