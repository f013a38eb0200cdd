"""Routes for operators: encode passages before the first question, and forget some."""

from __future__ import annotations

import asyncio
import logging
import threading
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field

from rag_windows import CacheError, CancelledGenerationError, PassageCache
from rag_windows_server.answering import until_left
from rag_windows_server.documents import passages_in
from rag_windows_server.errors import ApiError, busy, refused
from rag_windows_server.keys import Tenant
from rag_windows_server.routes import Served, body_schema

_log = logging.getLogger("rag_windows.server")


class Warm(BaseModel):
    """Passages to encode.

    Attributes:
        documents: in the forms of questions; None for all of the server's own.
        system: the system prompt of later questions; windows fit requests that have the same.
        ttl: seconds for which the windows may be used.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    documents: list[str | dict[str, Any]] | None = None
    system: str | None = None
    ttl: float | None = Field(default=None, gt=0)


def deleted(id: str, windows: int, passages: int) -> dict[str, object]:
    """What a DELETE has done."""
    return {
        "object": "passages.deleted",
        "id": id,
        "deleted": windows,
        "passages": passages,
        "message": f"Windows removed from the passage cache: {windows}. Passages of the server's "
        f"documents that are not retrieved any more: {passages}. Files stay as they are, and are "
        "read again when the server starts.",
    }


def routes(served: Served) -> APIRouter:
    """Both routes."""
    router = APIRouter(tags=["passages"])

    def cache(tenant: Tenant) -> PassageCache:
        found = served.answering.model(tenant).cache
        if found is None:
            message = "This server has no passage cache. Start it without --no-cache."
            raise ApiError(409, message, code="no_cache")
        return found

    @router.post(
        "/v1/passages/warm",
        summary="Encode passages before the first question",
        openapi_extra=body_schema(Warm),
    )
    async def warm(request: Request) -> dict[str, object]:
        tenant = served.operator(request)
        cache(tenant)
        body = await served.body(request, Warm)
        passages: Any = passages_in(body.documents, "documents")
        if body.documents is None:
            own = served.answering.retriever
            passages = None if own is None else own.passages
            if passages is None:
                raise refused("documents", "this server can't list its own. Send some.", "missing")
        given = (served.settings.system, body.system)
        parts = [part for part in given if part]
        if not parts and body.documents is None and served.settings.default_system:
            parts = [served.settings.default_system]
        lm, prefix = served.answering.model(tenant), "\n\n".join(parts) or None
        left = threading.Event()

        def check(*_: object) -> None:
            if left.is_set() or served.answering.line.closed:
                raise CancelledGenerationError("Nobody waits for these passages any more.")

        work = asyncio.to_thread(lm.warm, passages, prefix=prefix, ttl=body.ttl, on_warmed=check)
        try:
            done = await until_left(request, work)
        finally:
            left.set()
        return {"object": "passages.warmed", **asdict(done)}

    @router.delete(
        "/v1/passages/{id:path}",
        summary="Remove a passage's or document's windows from the cache, and retrieve it no more",
    )
    async def forget(id: str, request: Request) -> dict[str, object]:
        tenant, own = served.operator(request), served.answering.retriever
        found = served.answering.model(tenant).cache if own is not None else cache(tenant)
        # First, so that no question encodes it again meanwhile.
        hidden = 0 if own is None else await asyncio.to_thread(own.delete, [id])
        try:
            removed = 0 if found is None else await asyncio.to_thread(found.invalidate, [id])
        except CacheError as error:  # the shared store: what is here is gone
            raise busy(503, str(error), 5) from error
        if hidden:
            _log.info("%d passages are not retrieved any more, until the next start.", hidden)
        return deleted(id, removed, hidden)

    return router
