"""OpenAI's routes for files and vector stores, where their meaning fits: there is one store."""

from __future__ import annotations

import asyncio
import base64
import binascii
import os
from collections.abc import Callable
from typing import Any, Literal

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from rag_windows_server.collection import Collection, document_of
from rag_windows_server.errors import ApiError, refused
from rag_windows_server.own_documents import After, Limit, changed, page
from rag_windows_server.routes import Served, body_schema
from rag_windows_server.uploads import Upload, form_parts, is_form, uploaded

STORE = "vs_documents"
"""The one vector store."""

_BEGIN = "file-"
_PURPOSES = ("assistants", "user_data")

Order = Literal["asc", "desc"]


class StoreFile(BaseModel):
    """A file for the vector store, in which all files are already."""

    model_config = ConfigDict(extra="forbid", strict=True)

    file_id: str
    attributes: dict[str, Any] | None = None
    chunking_strategy: dict[str, Any] | None = None


class StoreSearch(BaseModel):
    """A search of the vector store; see OpenAI."""

    model_config = ConfigDict(extra="forbid", strict=True)

    query: str | list[str]
    max_num_results: int = Field(default=10, ge=1)
    filters: dict[str, Any] | None = None
    ranking_options: dict[str, Any] | None = None
    rewrite_query: bool | None = None


def file_id(name: str) -> str:
    """The id of a file, from which its name can be read: names may hold any character."""
    packed = base64.urlsafe_b64encode(name.encode("utf-8", "surrogatepass"))
    return _BEGIN + packed.decode().rstrip("=")


def file_name(id: str) -> str:
    """The name that an id stands for; a text that is no id is returned as it is."""
    packed = id.removeprefix(_BEGIN)
    try:
        name = base64.b64decode(packed + "=" * (-len(packed) % 4), b"-_", validate=True)
        found = name.decode("utf-8")
    except (binascii.Error, ValueError):
        return id
    return found if file_id(found) == id else id


def routes(served: Served) -> APIRouter:
    """All of them."""
    router = APIRouter(tags=["files"])

    def collection(request: Request) -> Collection:
        served.operator(request)
        return served.collection()

    def store(id: str) -> None:
        if id != STORE:
            message = f"There is no vector store {id!r:.100}. The one of this server is {STORE}."
            raise ApiError(404, message, param="vector_store_id", code="not_found")

    def store_entry(held: Collection) -> dict[str, Any]:
        counts = held.index.counts()
        none = dict.fromkeys(("in_progress", "failed", "cancelled"), 0)
        return {
            "id": STORE,
            "object": "vector_store",
            "created_at": served.created,
            "name": "documents",
            "usage_bytes": os.path.getsize(held.index.path),
            "file_counts": {**none, "completed": counts.files, "total": counts.files},
            "status": "completed",
            "last_active_at": served.created,
            "metadata": {},
        }

    def refuse_store(_: Request) -> None:
        why = f"this server has one vector store, {STORE}, and no other can be made. Use that one."
        raise refused("vector_store", why)

    async def listed(
        held: Collection, limit: int, after: str | None, order: Order, entry: Callable[..., Any]
    ) -> dict[str, object]:
        if order == "desc":
            why = "files are listed as they came. Leave it out, or ask for asc."
            raise refused("order", why, "invalid_value")

        def read() -> dict[str, object]:
            name = None if after is None else file_name(after)
            with held.index.snapshot():
                if name is not None and not held.index.files(name):
                    why = "names no file. Begin again without it."
                    raise refused("after", why, "invalid_value")
                return page(held.index.files(after=name, limit=limit + 1), limit, entry)

        return await asyncio.to_thread(read)

    async def found(held: Collection, id: str, entry: Callable[..., Any]) -> dict[str, Any]:
        files = await asyncio.to_thread(held.index.files, file_name(id))
        if not files:
            raise _unknown(id)
        made: dict[str, Any] = entry(files[0])
        return made

    async def removed(held: Collection, id: str, kind: str) -> dict[str, object]:
        if not (await changed(held.remove, file_name(id))).found:
            raise _unknown(id)
        return {"id": id, "object": kind, "deleted": True}

    @router.post("/v1/files", summary="Add a file's documents")
    async def create(request: Request) -> dict[str, Any]:
        held, kind = collection(request), request.headers.get("content-type", "")
        if not is_form(kind):
            message = "The body must be a form with a file. Send it as multipart/form-data."
            raise ApiError(415, message, code="unsupported_media_type")
        body = await served.raw(request)
        upload = await asyncio.to_thread(_upload, body, kind)
        await changed(held.add, upload.documents, upload.name)
        made = await found(held, file_id(upload.name), _file)
        if upload.skipped:
            reasons = [f"{one.label}: {one.reason}" for one in upload.skipped]
            made["status_details"] = "; ".join(reasons)[:500]
        return made

    @router.get("/v1/files", summary="The files of the server's own documents")
    async def files(
        request: Request,
        limit: Limit = 1000,
        after: After = None,
        order: Order = "asc",
        purpose: str | None = None,
    ) -> dict[str, object]:
        held = collection(request)
        if purpose is not None and purpose not in _PURPOSES:
            return page([], limit, _file)
        return await listed(held, limit, after, order, _file)

    @router.get("/v1/files/{id}", summary="One of them")
    async def file(id: str, request: Request) -> dict[str, Any]:
        return await found(collection(request), id, _file)

    @router.get("/v1/files/{id}/content", summary="Its text", response_model=None)
    async def content(id: str, request: Request) -> Response:
        held = collection(request)
        passages = await asyncio.to_thread(held.index.in_file, file_name(id))
        if not passages:
            raise _unknown(id)
        text = "\n\n".join(one.text for one in passages)
        # Whoever opens it in a browser must not run what a document holds.
        safe = {"X-Content-Type-Options": "nosniff", "Content-Security-Policy": "sandbox"}
        return Response(text, media_type="text/plain; charset=utf-8", headers=safe)

    @router.delete("/v1/files/{id}", summary="Remove its documents and their windows for good")
    async def delete(id: str, request: Request) -> dict[str, object]:
        return await removed(collection(request), id, "file")

    @router.get("/v1/vector_stores", summary="The one vector store, of the server's documents")
    async def stores(request: Request) -> dict[str, object]:
        held = collection(request)
        return page([await asyncio.to_thread(store_entry, held)], 1, dict)

    @router.post("/v1/vector_stores", summary="Refused: there is one already")
    async def create_store(request: Request) -> None:
        collection(request)
        refuse_store(request)

    @router.get("/v1/vector_stores/{store_id}", summary="The same, by its id")
    async def one_store(store_id: str, request: Request) -> dict[str, Any]:
        held = collection(request)
        store(store_id)
        return await asyncio.to_thread(store_entry, held)

    @router.post("/v1/vector_stores/{store_id}", summary="Refused: it can't be changed")
    async def change_store(store_id: str, request: Request) -> None:
        collection(request)
        store(store_id)
        why = "the name, metadata and lifetime of the one vector store are fixed. Leave them out."
        raise refused("vector_store", why)

    @router.delete("/v1/vector_stores/{store_id}", summary="Refused: remove its files instead")
    async def delete_store(store_id: str, request: Request) -> None:
        collection(request)
        store(store_id)
        why = "the one vector store can't be deleted. Delete its files."
        raise refused("vector_store", why)

    @router.post(
        "/v1/vector_stores/{store_id}/search",
        summary="Find passages without an answer",
        openapi_extra=body_schema(StoreSearch),
    )
    async def search(store_id: str, request: Request) -> dict[str, object]:
        served.tenant(request)  # whoever may ask sees the same passages in citations
        held = served.collection()
        store(store_id)
        asked = await served.body(request, StoreSearch)
        if asked.filters is not None:
            raise refused("filters", "documents have no attributes here. Leave it out.")
        if asked.rewrite_query:
            raise refused("rewrite_query", "the query is searched as it is. Leave it out.")
        for name, value in (asked.ranking_options or {}).items():
            if value not in (None, "auto", "none"):
                why = "scores are the retriever's own. Leave it out."
                raise refused(f"ranking_options.{name}", why)
        most = served.settings.most_top_k
        if asked.max_num_results > most:
            why = f"{asked.max_num_results} is more than this server's {most}."
            raise refused("max_num_results", why, "invalid_value")
        queries = [asked.query] if isinstance(asked.query, str) else asked.query
        hits = await asyncio.to_thread(_search, held, "\n\n".join(queries), asked.max_num_results)
        return {
            "object": "vector_store.search_results.page",
            "search_query": queries,
            "data": hits,
            "has_more": False,
            "next_page": None,
        }

    @router.post(
        "/v1/vector_stores/{store_id}/files",
        summary="A file for the vector store, in which it is already",
        openapi_extra=body_schema(StoreFile),
    )
    async def put(store_id: str, request: Request) -> dict[str, Any]:
        held = collection(request)
        store(store_id)
        asked = await served.body(request, StoreFile)
        if asked.attributes:
            why = "documents have no attributes here. Send metadata to POST /v1/documents."
            raise refused("attributes", why)
        if asked.chunking_strategy not in (None, {"type": "auto"}):
            raise refused("chunking_strategy", "the index has its own. Leave it out.")
        return await found(held, asked.file_id, _store_file)

    @router.get("/v1/vector_stores/{store_id}/files", summary="Its files")
    async def store_files(
        store_id: str,
        request: Request,
        limit: Limit = 20,
        after: After = None,
        order: Order = "asc",
        filter: str | None = None,
    ) -> dict[str, object]:
        held = collection(request)
        store(store_id)
        if filter not in (None, "completed"):
            return page([], limit, _store_file)
        return await listed(held, limit, after, order, _store_file)

    @router.get("/v1/vector_stores/{store_id}/files/{id}", summary="One of them")
    async def store_file(store_id: str, id: str, request: Request) -> dict[str, Any]:
        held = collection(request)
        store(store_id)
        return await found(held, id, _store_file)

    @router.delete(
        "/v1/vector_stores/{store_id}/files/{id}",
        summary="Remove the file's documents and their windows for good",
    )
    async def delete_from_store(store_id: str, id: str, request: Request) -> dict[str, object]:
        held = collection(request)
        store(store_id)
        return await removed(held, id, "vector_store.file.deleted")

    return router


def _unknown(id: str) -> ApiError:
    message = f"There is no file {id!r:.200}; see GET /v1/files."
    return ApiError(404, message, param="file_id", code="not_found")


def _upload(body: bytes, kind: str) -> Upload:
    sent: list[Any] = []
    for one in form_parts(body, kind):
        if one.name == "file" and one.file is not None:
            sent.append(one)
        elif one.name == "purpose":
            if one.data.decode("utf-8", "replace") not in _PURPOSES:
                why = f"must be {' or '.join(_PURPOSES)}: a file's documents are retrieved."
                raise refused("purpose", why, "invalid_value")
        else:
            why = "is not known here. A file stays until it is deleted."
            raise refused(one.name[:100], why, "unknown_parameter")
    if len(sent) != 1:
        why = f"must be one file, not {len(sent)}. Send several one after the other."
        raise refused("file", why, "missing_required_parameter")
    return uploaded(sent[0])


def _file(one: Any) -> dict[str, Any]:
    return {
        "id": file_id(one.name),
        "object": "file",
        "bytes": one.size,
        "created_at": int(one.added),
        "filename": one.name,
        "purpose": "assistants",
        "status": "processed",
    }


def _store_file(one: Any) -> dict[str, Any]:
    return {
        "id": file_id(one.name),
        "object": "vector_store.file",
        "created_at": int(one.added),
        "usage_bytes": one.size,
        "vector_store_id": STORE,
        "status": "completed",
        "last_error": None,
        "attributes": {},
    }


def _search(held: Collection, query: str, k: int) -> list[dict[str, Any]]:
    hits: list[dict[str, Any]] = []
    with held.index.snapshot():
        for one in held.retrieve(query, k):
            documents = held.index.documents(document_of(one), limit=1)
            name = (documents[0].source or documents[0].id) if documents else document_of(one)
            hits.append(
                {
                    "file_id": file_id(name),
                    "filename": name,
                    "score": getattr(one, "score", None) or 0.0,
                    "attributes": {},
                    "content": [{"type": "text", "text": one.text}],
                }
            )
    return hits
