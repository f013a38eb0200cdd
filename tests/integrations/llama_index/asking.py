"""LLMs and engines of LlamaIndex, asked in every way, and what its events tell of the answers."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.base.llms.types import ChatMessage, ChatResponse, CompletionResponse
from llama_index.core.bridge.pydantic import BaseModel, Field
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.prompts import PromptTemplate
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode
from llama_index_instrumentation import get_dispatcher

from llama_index.llms.rag_windows import RagWindowsLLM
from tests.integrations.cases import Case, reader

BARE = PromptTemplate("{context_str}\n{query_str}")
"""The embedded reader was taught to answer the bare question behind its passages."""

WAYS = ("sync", "async", "stream", "astream")
NAMES = {
    "chat": ("chat", "achat", "stream_chat", "astream_chat"),
    "complete": ("complete", "acomplete", "stream_complete", "astream_complete"),
    "predict": ("predict", "apredict", "stream", "astream"),
    "tools": tuple(f"{way}chat_with_tools" for way in ("", "a", "stream_", "astream_")),
    "query": ("query", "aquery", "query", "aquery"),
}
ENDPOINTS = [(verb, way) for verb in ("chat", "complete") for way in WAYS]
AWAITED = [(verb, way) for verb, way in ENDPOINTS if way in ("async", "astream")]


def user(text: str) -> list[ChatMessage]:
    return [ChatMessage(role="user", content=text)]


def text_of(answer: Any) -> str:
    if isinstance(answer, ChatResponse):
        return answer.message.content or ""
    return answer.text if isinstance(answer, CompletionResponse) else str(answer)


async def asked(target: Any, verb: str, way: str, *given: Any, **options: Any) -> tuple[Any, Any]:
    """What an asynchronous call gave, and all pieces of it."""
    made = await getattr(target, NAMES[verb][WAYS.index(way)])(*given, **options)
    if way == "async":
        return made, [made]
    stream = made.async_response_gen() if hasattr(made, "async_response_gen") else made
    return made, [piece async for piece in stream]


def ask(target: Any, verb: str, way: str, *given: Any, **options: Any) -> tuple[str, Any, Any]:
    """Text, response and pieces; a stream is read to its end."""
    if way in ("async", "astream"):
        made, pieces = asyncio.run(asked(target, verb, way, *given, **options))
    else:
        made = getattr(target, NAMES[verb][WAYS.index(way)])(*given, **options)
        pieces = [made] if way == "sync" else list(getattr(made, "response_gen", made))
    texts = [text_of(piece) for piece in pieces]
    return "".join(texts) if isinstance(pieces[0], str) else texts[-1], made, pieces


def question(verb: str, text: str) -> Any:
    return user(text) if verb == "chat" else text


@functools.cache
def llm() -> RagWindowsLLM:
    """The embedded reader as LlamaIndex's LLM."""
    return RagWindowsLLM(lm=reader(), max_new_tokens=16)


def nodes_of(case: Case) -> list[NodeWithScore]:
    return [
        NodeWithScore(
            node=TextNode(text=one.text, id_=one.id, metadata={"title": one.title}),
            score=1.0 - i / 100,
        )
        for i, one in enumerate(case.passages)
    ]


def nodes(*texts: str) -> list[NodeWithScore]:
    return [NodeWithScore(node=TextNode(text=text, id_=f"n{i}")) for i, text in enumerate(texts)]


class ListRetriever(BaseRetriever):
    """Returns always the same nodes."""

    def __init__(self, found: Sequence[NodeWithScore]) -> None:
        super().__init__()
        self.nodes = list(found)

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return list(self.nodes)


class Told(BaseEventHandler):
    """Keeps every event, exceptions with their tracebacks included."""

    events: list[Any] = Field(default_factory=list)

    def handle(self, event: Any, **_: Any) -> None:
        self.events.append(event)

    def named(self, *names: str) -> list[Any]:
        return [event for event in self.events if type(event).__name__ in names]

    def raws(self) -> list[dict[str, Any]]:
        """What is known of each answer."""
        ends = self.named("LLMChatEndEvent", "LLMCompletionEndEvent")
        return [dict(event.response.raw) for event in ends if event.response is not None]

    def chats(self) -> list[list[ChatMessage]]:
        """The messages of each chat that was begun."""
        return [list(event.messages) for event in self.named("LLMChatStartEvent")]


@contextmanager
def told() -> Iterator[Told]:
    handler, root = Told(), get_dispatcher()
    root.add_event_handler(handler)
    try:
        yield handler
    finally:
        root.event_handlers.remove(handler)


class Year(BaseModel):
    """An answer with a number."""

    year: int
