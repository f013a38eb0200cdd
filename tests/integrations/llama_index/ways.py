"""The four ways to ask a LlamaIndex engine, all of them to the end."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

from llama_index.core.base.response.schema import AsyncStreamingResponse, StreamingResponse
from llama_index.core.chat_engine.types import BaseChatEngine
from llama_index.core.query_engine import BaseQueryEngine

Way = Literal["sync", "async", "stream", "astream"]
WAYS: tuple[Way, ...] = ("sync", "async", "stream", "astream")


def streams(way: Way) -> bool:
    return way in ("stream", "astream")


def query(engine: BaseQueryEngine, question: str, way: Way) -> tuple[str, Any]:
    """Text and response; a stream is read to its end."""
    if way == "sync":
        response = engine.query(question)
        return str(response), response
    if way == "stream":
        response = engine.query(question)
        if not isinstance(response, StreamingResponse):
            raise TypeError(f"{type(response).__name__} is no stream")
        return "".join(response.response_gen), response

    async def ask() -> tuple[str, Any]:
        response = await engine.aquery(question)
        if way == "async":
            return str(response), response
        if not isinstance(response, AsyncStreamingResponse):
            raise TypeError(f"{type(response).__name__} is no stream")
        return "".join([piece async for piece in response.async_response_gen()]), response

    return asyncio.run(ask())


def chat(engine: BaseChatEngine, question: str, way: Way) -> tuple[str, Any]:
    """Text and response; a stream is read to its end."""
    if way == "sync":
        response = engine.chat(question)
        return response.response, response
    if way == "stream":
        stream = engine.stream_chat(question)
        return "".join(stream.response_gen), stream

    async def ask() -> tuple[str, Any]:
        if way == "async":
            response = await engine.achat(question)
            return response.response, response
        stream = await engine.astream_chat(question)
        return "".join([piece async for piece in stream.async_response_gen()]), stream

    return asyncio.run(ask())
