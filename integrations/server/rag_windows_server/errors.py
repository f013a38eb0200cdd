"""Errors of requests in the form of OpenAI's API."""

from __future__ import annotations

import json
import logging
import re
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi.responses import JSONResponse
from pydantic import ValidationError

from rag_windows.errors import (
    CancelledGenerationError,
    GenerationError,
    GenerationTimeoutError,
    InputError,
    LimitError,
    MissingExtraError,
    RagWindowsError,
    ToolsUnsupportedError,
)

_log = logging.getLogger("rag_windows.server")

INVALID = "invalid_request_error"
_SERVER = "server_error"
_LONGEST = 500


class ApiError(Exception):
    """An answer that is an error, ``{"error": {"message", "type", "param", "code"}}``.

    Attributes:
        status: of HTTP.
        headers: of the answer.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = INVALID,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.headers = status, dict(headers or {})
        # Both may repeat what a request holds, which may be long.
        clipped = {"message": message[:_LONGEST], "param": param and param[:_LONGEST]}
        self.error = {
            "message": clipped["message"],
            "type": type,
            "param": clipped["param"],
            "code": code,
        }

    def response(self) -> JSONResponse:
        """The same as what is sent."""
        return JSONResponse({"error": self.error}, self.status, self.headers)


def refused(param: str, why: str, code: str = "unsupported_parameter") -> ApiError:
    """A parameter that this server does not take; ``why`` is a sentence with what to do."""
    return ApiError(400, f"{param}: {why}", param=param, code=code)


def busy(status: int, message: str, retry_after: int) -> ApiError:
    """Too many requests (429), or no service now (503)."""
    kind = ("rate_limit_error", "queue_full") if status == 429 else (_SERVER, "unavailable")
    headers = {"Retry-After": str(retry_after)}
    return ApiError(status, message, type=kind[0], code=kind[1], headers=headers)


def of(error: RagWindowsError) -> ApiError:
    """An error of the engine as the answer to a request."""
    message = str(error)
    if isinstance(error, LimitError):
        return ApiError(400, message, code="context_length_exceeded")
    if isinstance(error, ToolsUnsupportedError):
        return ApiError(400, message, param="tools", code="unsupported_parameter")
    if isinstance(error, InputError) or type(error) is GenerationError:
        return ApiError(400, message, code="invalid_value")
    if isinstance(error, MissingExtraError):
        return missing(None, error)
    if isinstance(error, GenerationTimeoutError):
        # Asking again would take as long, and openai's client would do so by itself.
        again = {"x-should-retry": "false"}
        return ApiError(504, message, type=_SERVER, code="timeout", headers=again)
    if isinstance(error, CancelledGenerationError):
        return busy(503, "The server ended this answer, because it stops.", 5)
    return internal()


def missing(param: str | None, error: MissingExtraError) -> ApiError:
    """A field whose package is missing; the operator's log has the command that installs it."""
    _log.warning("A request was refused: %s", error)
    place = "" if param is None else f"{param}: "
    message = "This server lacks a package that this request needs. Its operator can install it."
    return ApiError(400, f"{place}{message}", param=param, code="unsupported_parameter")


def internal() -> ApiError:
    """An error that the request did not cause; the server's log has its details."""
    message = "The server failed to answer. Its log has the details under this request's id."
    return ApiError(500, message, type=_SERVER, code="internal_error")


def log_failure(request_id: str, error: BaseException) -> None:
    """Log where an error came from, without its message, which may hold texts of a request."""
    places = "".join(traceback.format_tb(error.__traceback__))
    _log.error("%s failed: %s\n%s", request_id, type(error).__name__, places)


def answered(error: Exception, request_id: str) -> ApiError:
    """Any error of a request as its answer; an error that it did not cause is logged."""
    if isinstance(error, ApiError):
        return error
    found = of(error) if isinstance(error, RagWindowsError) else internal()
    if found.status == 500:
        log_failure(request_id, error)
    return found


def error_event(error: ApiError, number: int | None = None) -> str:
    """An error as a server-sent event, for a stream whose status was sent already.

    Args:
        number: of the event in a stream of ``/v1/responses``; None in one of chat completions.
    """
    data: dict[str, Any] = {"error": error.error}
    if number is None:
        return f"data: {json.dumps(data)}\n\n"
    data |= {name: error.error[name] for name in ("message", "code", "param")}
    data |= {"type": "error", "sequence_number": number}
    return f"event: error\ndata: {json.dumps(data)}\n\ndata: [DONE]\n\n"


def malformed(error: ValidationError) -> ApiError:
    """The first thing that is wrong with a body."""
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    param = _place(first["loc"])
    if first["type"] == "extra_forbidden":
        message = f"Unrecognized request argument supplied: {param}"
        return ApiError(400, message, param=param, code="unknown_parameter")
    if first["type"] == "missing":
        message = f"Missing required parameter: '{param}'."
        return ApiError(400, message, param=param, code="missing_required_parameter")
    message = f"{param or 'The body'}: {first['msg'].removeprefix('Value error, ')}"
    return ApiError(400, message, param=param or None, code="invalid_value")


# What pydantic puts between the names of fields: the kinds of a union.
_KIND = re.compile(r"(str|int|float|bool|dict|list|tuple|none|function|literal|constrained)\b.*")


def _place(loc: Sequence[Any]) -> str:
    """A field as OpenAI writes it: ``messages[0].content``."""
    place = ""
    for part in loc:
        if isinstance(part, int):
            place += f"[{part}]"
        elif not (place and _KIND.fullmatch(part)):
            place += f".{part}" if place else part
    return place
