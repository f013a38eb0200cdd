"""Reads files that come with a request, by their bytes; no file of this machine is ever opened."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fastapi import Request
from starlette.exceptions import HTTPException

from rag_windows_server.errors import ApiError, refused

if TYPE_CHECKING:
    from rag_windows_retrievers import Document, Skipped

_LONGEST_NAME = 512


@dataclass(frozen=True, slots=True)
class Part:
    """A field of a form: its name, the file's name if it is a file, and what it holds."""

    name: str
    file: str | None
    data: bytes


@dataclass(frozen=True, slots=True)
class Upload:
    """A file that was sent, read.

    Attributes:
        name: of the file, without folders.
        documents: that it holds.
        skipped: lines and pages that can't be used, and why.
    """

    name: str
    documents: list[Document]
    skipped: list[Skipped]


def is_form(request: Request) -> bool:
    """Whether a request announces a form with files."""
    kind = request.headers.get("content-type", "")
    return kind.lower().startswith("multipart/form-data")


async def form_parts(request: Request) -> list[Part]:
    """The fields of a form.

    Raises:
        ApiError: it is no form.
    """
    try:
        async with request.form(max_files=math.inf) as form:
            return [
                Part(name, None, one.encode())
                if isinstance(one, str)
                else Part(name, one.filename or "", await one.read())
                for name, one in form.multi_items()
            ]
    except HTTPException as error:
        message = f"The body is no form with files. {error.detail}"
        raise ApiError(400, message, code="invalid_form") from error


def uploaded(part: Part) -> Upload:
    """The documents of a file.

    Raises:
        ApiError: its name can't be used, or there is no text in it.
    """
    from rag_windows_retrievers import Skipped, documents_of

    # Some clients send their own folders along.
    name = re.split(r"[/\\]", part.file or "")[-1]
    check_name(name, part.name)
    found = documents_of(part.data, name)
    documents = [one for one in found if not isinstance(one, Skipped)]
    skipped = [one for one in found if isinstance(one, Skipped)]
    if not documents:
        reason = skipped[0].reason.rstrip(".") if skipped else "it is empty"
        why = f"the file {name!r:.100} holds no text that can be read: {reason}. Send another one."
        raise refused(part.name, why, "unreadable_file")
    for one in documents:
        check_name(one.id, part.name)
    return Upload(name, documents, skipped)


def check_name(name: str, param: str) -> None:
    """Refuse names of documents and files that could not be shown, or not be found again.

    Raises:
        ApiError: it is empty, too long, or holds characters that can't be printed.
    """
    if not name.strip() or name in (".", "..") or not name.isprintable():
        why = f"the name {name!r:.100} must hold characters, and only such as can be printed."
        raise refused(param, why, "invalid_value")
    if len(name) > _LONGEST_NAME:
        why = f"the name {name!r:.60} must have at most {_LONGEST_NAME} characters."
        raise refused(param, why, "invalid_value")
