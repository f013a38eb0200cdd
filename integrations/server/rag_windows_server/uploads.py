"""Reads files that come with a request, by their bytes; no file of this machine is ever opened."""

from __future__ import annotations

import re
from dataclasses import dataclass
from email.message import Message
from typing import TYPE_CHECKING

from rag_windows_server.errors import ApiError, refused

if TYPE_CHECKING:
    from rag_windows_retrievers import Document, Skipped

_ESCAPED = re.compile(r"%(0[0-9A-F]|1[0-9A-F]|22)")
"""What browsers write for quotes and control characters in names, and for nothing else."""

_LONGEST_HEAD = 16 << 10
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


def is_form(content_type: str) -> bool:
    """Whether a header Content-Type announces a form with files."""
    return content_type.lower().startswith("multipart/form-data")


def form_parts(body: bytes, content_type: str) -> list[Part]:
    """The fields of a form (RFC 7578).

    Raises:
        ApiError: it is no form.
    """
    boundary = _header("Content-Type", content_type).get_boundary()
    if not boundary:
        raise _malformed("Its Content-Type names no boundary.")
    try:
        mark = b"\r\n--" + boundary.encode("ascii")
    except UnicodeEncodeError as error:
        raise _malformed("Its boundary must be ASCII.") from error
    _, *pieces = (b"\r\n" + body).split(mark)
    if not pieces or not pieces[-1].startswith(b"--"):
        raise _malformed("Its end is missing.")
    return [_part(one) for one in pieces[:-1]]


def _part(piece: bytes) -> Part:
    head, blank, data = piece.partition(b"\r\n\r\n")
    if not blank or len(head) > _LONGEST_HEAD:
        raise _malformed("A part of it has no head.")
    for line in head.decode("utf-8", "replace").split("\r\n"):
        name, _, value = line.partition(":")
        if name.strip().lower() == "content-disposition":
            message = _header("Content-Disposition", value.strip())
            field = message.get_param("name", "", "content-disposition")
            file = message.get_filename()
            return Part(str(field), None if file is None else _unescaped(file), data)
    raise _malformed("A part of it has no name.")


def _header(name: str, value: str) -> Message:
    message = Message()
    message[name] = value
    return message


def _unescaped(name: str) -> str:
    return _ESCAPED.sub(lambda found: chr(int(found[1], 16)), name)


def _malformed(why: str) -> ApiError:
    return ApiError(400, f"The body is no form with files. {why}", code="invalid_form")


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
