"""Routes for operators: encode passages before the first question, and forget some."""

from __future__ import annotations

import asyncio
import logging
import threading
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field

from rag_windows import CancelledGenerationError, PassageCache
from rag_windows_server.answering import until_left
from rag_windows_server.collection import Collection, ReadDocuments
from rag_windows_server.documents import passages_in
from rag_windows_server.errors import ApiError, refused
from rag_windows_server.keys import Tenant
from rag_windows_server.own_documents import changed
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


def deleted(id: str, windows: int, passages: int, *, lasting: bool) -> dict[str, object]:
    """What a DELETE has done; it lasts where the documents are those of an index."""
    if lasting:
        rest = (
            f"Passages removed from the index: {passages}. Files stay as they are; one that is "
            "deleted as a whole is not read again, and one that loses a passage is read again as a "
            "whole when it changes."
        )
    else:
        rest = (
            f"Passages of the server's documents that are not retrieved any more: {passages}. "
            "Files stay as they are, and are read again when the server starts."
        )
    return {
        "object": "passages.deleted",
        "id": id,
        "deleted": windows,
        "passages": passages,
        "lasting": lasting,
        "message": f"Windows removed from the passage cache: {windows}. {rest}",
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
        collection, reading = served.answering.collection, None
        if body.documents is None:
            if collection is not None:
                reading = ReadDocuments(collection.index.version)
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
            if collection is not None:
                collection.ended(reading)
        return {"object": "passages.warmed", **asdict(done)}

    @router.delete(
        "/v1/passages/{id:path}",
        summary="Remove a passage's or document's windows from the cache, and retrieve it no more",
    )
    async def forget(id: str, request: Request) -> dict[str, object]:
        tenant, own = served.operator(request), served.answering.retriever
        if isinstance(own, Collection):
            done = await changed(own.remove_named, id)
            return deleted(id, done.windows, done.passages, lasting=True)
        found = served.answering.model(tenant).cache if own is not None else cache(tenant)
        # First, so that no question encodes it again meanwhile.
        hidden = 0 if own is None else await asyncio.to_thread(own.delete, [id])
        removed = 0 if found is None else await changed(found.invalidate, [id])
        if hidden:
            _log.info("%d passages are not retrieved any more, until the next start.", hidden)
        return deleted(id, removed, hidden, lasting=False)

    return router
