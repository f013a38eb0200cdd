"""Routes for operators: the server's own documents are listed, added, replaced and removed."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, ConfigDict

from rag_windows import CacheError, Passage, RetrievalError
from rag_windows_server.collection import Collection
from rag_windows_server.documents import passages_in
from rag_windows_server.errors import ApiError, busy, refused
from rag_windows_server.routes import Served, read_body
from rag_windows_server.uploads import Upload, check_name, form_parts, is_form, uploaded

if TYPE_CHECKING:
    from rag_windows_retrievers import Changes, Document, IndexedDocument, Skipped

_log = logging.getLogger("rag_windows.server")

T = TypeVar("T")

MOST_LISTED = 10_000
Limit = Annotated[int, Query(ge=1, le=MOST_LISTED)]
After = Annotated[str | None, Query()]


class AddedDocuments(BaseModel):
    """Documents to add, in the forms of questions.

    Attributes:
        documents: texts, or objects with ``id``, ``title``, ``text`` and ``metadata``.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    documents: list[str | dict[str, Any]]


async def changed(work: Callable[..., T], *given: Any) -> T:
    """What a change of the documents gives, done in a thread; errors name no folder."""
    try:
        return await asyncio.to_thread(work, *given)
    except CacheError as error:  # the shared store: what is here is gone
        raise busy(503, str(error), 5) from error
    except RetrievalError as error:
        _log.warning("The documents could not be changed: %s", error)
        message = "The documents can't be changed now. The server's log tells why. Try again later."
        raise busy(503, message, 30) from error


def document_removed(id: str, documents: int, passages: int, windows: int) -> dict[str, object]:
    """What a DELETE of a document, or of all documents of a file, has done."""
    return {
        "object": "document.deleted",
        "id": id,
        "deleted": True,
        "documents": documents,
        "passages": passages,
        "windows": windows,
        "message": f"Documents removed from the index: {documents}, with {passages} passages. "
        f"Windows removed from the passage cache: {windows}. A file of that name in a followed "
        "folder stays as it is, and is not read again.",
    }


def unknown(id: str) -> ApiError:
    """There is no such document."""
    message = f"There is no document {id!r:.200}; see GET /v1/documents."
    return ApiError(404, message, param="id", code="document_not_found")


def page(found: list[T], limit: int, entry: Callable[[T], dict[str, Any]]) -> dict[str, object]:
    """A page of a list as OpenAI's lists have them; ``found`` holds one more if there is more."""
    data = [entry(one) for one in found[:limit]]
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": len(found) > limit,
    }


def routes(served: Served) -> APIRouter:
    """All of them."""
    router = APIRouter(tags=["documents"])

    @router.post("/v1/documents", summary="Add documents, or replace those of the same names")
    async def add(request: Request) -> dict[str, object]:
        served.operator(request)
        collection = served.collection()
        kind = request.headers.get("content-type", "")
        if is_form(kind):
            form = await served.raw(request)
            files = await asyncio.to_thread(_files, form, kind)
            return await changed(_add_files, collection, files)
        body = read_body(await served.json_text(request), AddedDocuments)
        documents = await asyncio.to_thread(_documents, body)
        changes, windows = await changed(collection.add, documents)
        return _added(collection, [changes], windows, [])

    @router.get("/v1/documents", summary="The server's own documents")
    async def listed(request: Request, limit: Limit = 20, after: After = None) -> dict[str, object]:
        served.operator(request)
        collection = served.collection()
        return await asyncio.to_thread(_listed, collection, limit, after)

    @router.get("/v1/documents/{id:path}", summary="One of them")
    async def one(id: str, request: Request) -> dict[str, object]:
        served.operator(request)
        collection = served.collection()
        found = await asyncio.to_thread(collection.index.documents, id)
        if not found:
            raise unknown(id)
        return _entry(found[0])

    @router.delete("/v1/documents/{id:path}", summary="Remove a document and its windows for good")
    async def remove(id: str, request: Request) -> dict[str, object]:
        served.operator(request)
        removed = await changed(served.collection().remove, id)
        if not removed.found:
            raise unknown(id)
        return document_removed(id, removed.documents, removed.passages, removed.windows)

    return router


def _documents(body: AddedDocuments) -> list[Document]:
    found = []
    for index, one in enumerate(passages_in(body.documents, "documents")):
        param = f"documents[{index}]"
        if not one.text.strip():
            raise refused(f"{param}.text", "is blank. Give it a text.", "invalid_value")
        found.append(_document(one, f"{param}.id"))
    return found


def _document(passage: Passage, param: str) -> Document:
    from rag_windows_retrievers import Document

    said = f"{passage.title or ''}\n{passage.text}".encode("utf-8", "surrogatepass")
    name = passage.id or f"doc-{hashlib.sha256(said).hexdigest()[:24]}"
    check_name(name, param)
    text = passage.text.replace("\r\n", "\n").replace("\r", "\n")
    return Document(text, name, passage.title, named=True, metadata=dict(passage.metadata))


def _files(body: bytes, kind: str) -> list[Upload]:
    parts = form_parts(body, kind)
    if other := [one.name for one in parts if one.file is None]:
        raise refused(other[0], "is not known here. Send files alone.", "unknown_parameter")
    if not parts:
        raise refused("file", "is missing. Send a file or several.", "missing_required_parameter")
    return [uploaded(one) for one in parts]


def _add_files(collection: Collection, files: list[Upload]) -> dict[str, object]:
    changes, windows = [], 0
    for one in files:
        done, removed = collection.add(one.documents, one.name)
        changes.append(done)
        windows += removed
    return _added(collection, changes, windows, [skip for one in files for skip in one.skipped])


def _added(
    collection: Collection, changes: list[Changes], windows: int, skipped: list[Skipped]
) -> dict[str, object]:
    touched = [id for one in changes for id in (*one.added, *one.replaced)]
    return {
        "object": "documents.added",
        "added": [id for one in changes for id in one.added],
        "replaced": [id for one in changes for id in one.replaced],
        "removed": [id for one in changes for id in one.removed],
        "unchanged": sum(one.unchanged for one in changes),
        "windows": windows,
        "skipped": [{"name": one.label, "reason": one.reason} for one in skipped],
        "data": [
            _entry(one) for id in dict.fromkeys(touched) for one in collection.index.documents(id)
        ],
    }


def _listed(collection: Collection, limit: int, after: str | None) -> dict[str, object]:
    index = collection.index
    with index.snapshot():
        if after is not None and not index.documents(after, limit=1):
            raise refused("after", "names no document. Begin again without it.", "invalid_value")
        found = page(index.documents(after=after, limit=limit + 1), limit, _entry)
        return {**found, "totals": asdict(index.counts())}


def _entry(one: IndexedDocument) -> dict[str, Any]:
    return {
        "object": "document",
        "id": one.id,
        "title": one.title,
        "source": one.source,
        "sha256": one.sha256,
        "created_at": int(one.added),
        "bytes": one.size,
        "passages": one.passages,
    }
