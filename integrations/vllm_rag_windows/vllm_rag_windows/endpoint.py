"""An endpoint plug-in of vLLM: chat completions over documents, under ``/v1/rag``.

OpenAI's clients ask it with ``base_url="http://HOST:8000/v1/rag"`` and
``extra_body={"documents": [...]}``. vLLM's own routes stay as they are, and its own handler
answers: the plug-in encodes what is missing, and hands on token ids.
"""

from __future__ import annotations

import asyncio
import uuid
from argparse import Namespace
from collections.abc import AsyncIterable, AsyncIterator, Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import ValidationError

from rag_windows.errors import InputError, RagWindowsError
from vllm_rag_windows.offline import engine_prompt, failed, sampling_of
from vllm_rag_windows.prompts import Document, Encoded, TokenRequest, WindowPrompts, WindowRequests
from vllm_rag_windows.windowed_prompt import new_cache_salt

PATH = "/v1/rag/chat/completions"
REFUSED = (
    *("add_generation_prompt", "cache_salt", "chat_template", "chat_template_kwargs"),
    *("continue_final_message", "echo", "functions", "kv_transfer_params", "prompt_logprobs"),
    *("tool_choice", "tools", "truncate_prompt_tokens", "use_beam_search"),
)
"""Fields of vLLM's chat completions that change a prompt, which is made here."""

_MOST_METHODS = 16
_STATE = "rag_windows"


class Served:
    """The model behind the route."""

    def __init__(self, engine: Any) -> None:
        self._engine, self._encoded = engine, Encoded()
        self._prompts: dict[str, WindowPrompts] = {}

    def requests(self, body: dict[str, Any]) -> WindowRequests:
        """What answers a body, whose fields ``documents`` and ``method`` are taken out of it.

        Raises:
            InputError: something in it is refused.
        """
        if given := [name for name in REFUSED if body.get(name) is not None]:
            raise InputError(f"{given} can't be had with windows. Leave them out.")
        method, documents = body.pop("method", "pcw"), body.pop("documents", [])
        messages = body.get("messages")
        for name, value in (("documents", documents), ("messages", messages)):
            if not isinstance(value, list):
                raise InputError(f"{name} must be a list.")
        if not isinstance(method, str):
            raise InputError("method must be a string, such as 'pcw'.")
        if method not in self._prompts:
            made = WindowPrompts(self._engine.get_tokenizer(), method=method)
            self._prompts = {**dict([*self._prompts.items()][-_MOST_METHODS:]), method: made}
        return self._prompts[method].build(_texts(messages), _named(documents))

    async def encode(self, requests: Sequence[TokenRequest], *, again: bool) -> None:
        """Encode windows, unless they were before, or `again`."""
        from vllm import SamplingParams

        async def one(request: TokenRequest) -> None:
            sampling = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
            outputs: AsyncIterator[Any] = self._engine.generate(
                engine_prompt(request), sampling_of(request, sampling), f"rag-{uuid.uuid4().hex}"
            )
            ends = [failed(output) async for output in outputs]
            if not any(ends):
                self._encoded.note([request])

        async with asyncio.TaskGroup() as group:
            for request in self._encoded.missing(requests, again=again):
                group.create_task(one(request))

    async def watched(
        self, events: AsyncIterable[Any], asked: WindowRequests
    ) -> AsyncIterator[Any]:
        """A stream's events; behind an error, its windows count as not encoded."""
        async for event in events:
            if str(event).startswith('data: {"error"'):
                self._encoded.forget(asked.encode)
            yield event


def _texts(messages: Any) -> list[Any]:
    """Messages whose content is a string; clients may send it as a list of parts with text."""

    def text(message: Any) -> Any:
        content = message.get("content") if isinstance(message, Mapping) else None
        if not isinstance(content, list):
            return message
        if any(not isinstance(part, Mapping) or part.get("type") != "text" for part in content):
            raise InputError("Messages may hold text alone. Send documents as 'documents'.")
        return {**message, "content": "".join(str(part.get("text", "")) for part in content)}

    return list(map(text, messages))


def _named(documents: Sequence[Any]) -> Sequence[Document]:
    for number, document in enumerate(documents):
        if not isinstance(document, str | Mapping):
            raise InputError(f"documents[{number}] must be a text or an object with a text.")
    return documents


async def chat_completions(request: Request) -> Any:
    """Answer ``POST /v1/rag/chat/completions``."""
    from vllm.entrypoints.openai.chat_completion.api_router import create_chat_completion
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.exceptions import GenerationError

    served: Served = getattr(request.app.state, _STATE)
    try:
        body = await request.json()
        if not isinstance(body, dict):
            raise InputError("The body must be an object.")
        asked = served.requests(body)
        wanted = ChatCompletionRequest.model_validate(body)
    except (RagWindowsError, ValidationError, TypeError, ValueError) as error:
        told = {"message": str(error), "type": "invalid_request_error", "param": None}
        return JSONResponse({"error": {**told, "code": 400}}, 400)

    async def answer(*, again: bool) -> Any:
        await served.encode(asked.encode, again=again)
        one = wanted.model_copy(deep=True)
        one.cache_salt = new_cache_salt()
        one.kv_transfer_params = {
            **(asked.read.params or {}),
            "prompt_token_ids": [*asked.read.ids],
        }
        return await create_chat_completion(one, request)

    try:
        found = await answer(again=False)
    except GenerationError:  # what was encoded before may have been evicted
        found = await answer(again=True)
    if isinstance(found, StreamingResponse):
        found.body_iterator = served.watched(found.body_iterator, asked)
    return found


class DocumentsEndpoint:
    """What vLLM loads where ``VLLM_PLUGINS`` names ``rag-windows``."""

    name = "rag-windows"
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        """Add the route."""
        app.add_api_route(PATH, chat_completions, methods=["POST"], tags=["rag-windows"])

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        """Remember the engine.

        Raises:
            InputError: vLLM was started without the connector.
        """
        transfer = engine_client.vllm_config.kv_transfer_config
        if transfer is None or transfer.kv_connector != "RagWindowsConnector":
            raise InputError(
                "The endpoint plug-in rag-windows needs the connector: start vLLM with "
                "--kv-transfer-config, kv_connector='RagWindowsConnector'. See docs/vllm.md."
            )
        setattr(state, _STATE, Served(engine_client))
