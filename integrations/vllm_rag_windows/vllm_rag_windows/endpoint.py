"""An endpoint plug-in of vLLM: chat completions over documents, under ``/v1/rag``.

OpenAI's clients ask it with ``base_url="http://HOST:8000/v1/rag"`` and
``extra_body={"documents": [...]}``. vLLM's own routes stay as they are, and its own handler
answers: the plug-in encodes what is missing, and hands on token ids.
"""

from __future__ import annotations

import asyncio
import uuid
from argparse import Namespace
from collections.abc import AsyncIterable, AsyncIterator, Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel

from rag_windows.errors import InputError, RagWindowsError
from vllm_rag_windows.prompts import (
    SentWindows,
    WindowedPrompt,
    WindowPrompts,
    checked,
    failed,
    vllm_request,
)

PATH = "/v1/rag/chat/completions"
REFUSED = (
    *("add_generation_prompt", "cache_salt", "chat_template", "chat_template_kwargs"),
    *("continue_final_message", "echo", "functions", "kv_transfer_params", "prompt_logprobs"),
    *("tool_choice", "tools", "truncate_prompt_tokens", "use_beam_search"),
)
"""Fields of vLLM's chat completions that change a prompt, which is made here."""


class WindowedBody(BaseModel):
    """The fields of a body that this route reads; vLLM's handler reads the others."""

    messages: list[dict[str, Any]]
    documents: list[str | dict[str, Any]] = []
    method: str = "pcw"


class DocumentsEndpoint:
    """What vLLM loads where ``VLLM_PLUGINS`` names ``rag-windows``."""

    name = "rag-windows"
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        """Add the route."""
        app.add_api_route(PATH, self.chat_completions, methods=["POST"], tags=["rag-windows"])

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
        self._engine, self._encoded = engine_client, SentWindows()
        self._prompts = WindowPrompts(engine_client.get_tokenizer())

    async def chat_completions(self, request: Request) -> Any:
        """Answer ``POST /v1/rag/chat/completions``."""
        from vllm.entrypoints.openai.chat_completion.api_router import create_chat_completion
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.exceptions import GenerationError

        try:
            body = await request.json()
            prompt = self._prompt(body)
            own = {name: body[name] for name in body if name not in ("documents", "method")}
            wanted = ChatCompletionRequest.model_validate(own)
        except (RagWindowsError, TypeError, ValueError) as error:
            details = {"message": str(error), "type": "invalid_request_error", "param": None}
            return JSONResponse({"error": {**details, "code": 400}}, 400)
        wanted.kv_transfer_params = {**(prompt.params or {}), "prompt_token_ids": [*prompt.ids]}

        async def answer() -> Any:
            await self._encode(prompt)
            return await create_chat_completion(wanted.model_copy(deep=True), request)

        try:
            found = await answer()
        except GenerationError:  # what was encoded before may have been evicted
            self._encoded.forget(prompt)
            found = await answer()
        if isinstance(found, StreamingResponse):
            found.body_iterator = self._watched(found.body_iterator, prompt)
        return found

    def _prompt(self, body: Any) -> WindowedPrompt:
        asked = checked(WindowedBody, body, "body")
        if given := [name for name in REFUSED if body.get(name) is not None]:
            raise InputError(f"{given} can't be had with windows. Leave them out.")
        messages = [_with_text(message) for message in asked.messages]
        return self._prompts.build(messages, asked.documents, asked.method)

    async def _encode(self, prompt: WindowedPrompt) -> None:
        """Encode the windows of a prompt, unless they were before."""

        async def one(encoding: WindowedPrompt) -> None:
            outputs: AsyncIterator[Any] = self._engine.generate(
                *vllm_request(encoding), f"rag-{uuid.uuid4().hex}"
            )
            if not any([failed(output) async for output in outputs]):
                self._encoded.note(encoding)

        async with asyncio.TaskGroup() as group:
            for encoding in self._encoded.missing([prompt]):
                group.create_task(one(encoding))

    async def _watched(
        self, events: AsyncIterable[Any], prompt: WindowedPrompt
    ) -> AsyncIterator[Any]:
        """A stream's events; behind an error, its windows count as not encoded."""
        async for event in events:
            if str(event).startswith('data: {"error"'):
                self._encoded.forget(prompt)
            yield event


def _with_text(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose content is a string; clients may send it as a list of parts with text."""
    parts = message.get("content")
    if not isinstance(parts, list):
        return message
    if any(not isinstance(part, Mapping) or part.get("type") != "text" for part in parts):
        raise InputError("Messages may hold text alone. Send documents as 'documents'.")
    return {**message, "content": "".join(str(part.get("text", "")) for part in parts)}
