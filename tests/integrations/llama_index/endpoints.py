"""The eight endpoints of a LlamaIndex LLM, each read to its end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from llama_index.core.base.llms.types import ChatMessage, ChatResponse, CompletionResponse
from llama_index.core.schema import NodeWithScore

from llama_index.llms.rag_windows import RagWindowsLLM
from rag_windows import Generation

Response = ChatResponse | CompletionResponse
Endpoint = Callable[..., list[Response]]


def user(text: str) -> list[ChatMessage]:
    return [ChatMessage(role="user", content=text)]


def text_of(response: Response) -> str:
    if isinstance(response, ChatResponse):
        return response.message.content or ""
    return response.text


async def gather(stream: Any) -> list[Response]:
    return [response async for response in stream]


async def achat(llm: RagWindowsLLM, question: str, **options: Any) -> list[Response]:
    return [await llm.achat(user(question), **options)]


async def acomplete(llm: RagWindowsLLM, question: str, **options: Any) -> list[Response]:
    return [await llm.acomplete(question, **options)]


async def astream_chat(llm: RagWindowsLLM, question: str, **options: Any) -> list[Response]:
    return await gather(await llm.astream_chat(user(question), **options))


async def astream_complete(llm: RagWindowsLLM, question: str, **options: Any) -> list[Response]:
    return await gather(await llm.astream_complete(question, **options))


ASYNC: dict[str, Callable[..., Coroutine[Any, Any, list[Response]]]] = {
    "achat": achat,
    "acomplete": acomplete,
    "astream_chat": astream_chat,
    "astream_complete": astream_complete,
}


def awaited(name: str) -> Endpoint:
    return lambda *arguments, **options: asyncio.run(ASYNC[name](*arguments, **options))


ENDPOINTS: dict[str, Endpoint] = {
    "chat": lambda llm, question, **options: [llm.chat(user(question), **options)],
    "complete": lambda llm, question, **options: [llm.complete(question, **options)],
    "stream_chat": lambda llm, question, **options: list(
        llm.stream_chat(user(question), **options)
    ),
    "stream_complete": lambda llm, question, **options: list(
        llm.stream_complete(question, **options)
    ),
    **{name: awaited(name) for name in ASYNC},
}
"""By name: (llm, question, **options) -> every response that came."""


def one_window_each(generation: Generation, nodes: Sequence[NodeWithScore]) -> bool:
    """Whether the engine's record has every node's whole text in its own window, in order."""
    spans = [(w.passage, w.part, w.parts, w.start, w.end) for w in generation.windows]
    return spans == [(i, 0, 1, 0, len(one.text)) for i, one in enumerate(nodes)]
