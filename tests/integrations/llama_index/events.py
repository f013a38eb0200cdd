"""LlamaIndex's instrumentation events, collected."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import llama_index.core.instrumentation as instrument
from llama_index.core.bridge.pydantic import Field
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events import BaseEvent
from llama_index.core.instrumentation.events.llm import LLMChatStartEvent
from llama_index.core.llms import ChatMessage


class Heard(BaseEventHandler):
    """Keeps what happened."""

    events: list[Any] = Field(default_factory=list)

    def handle(self, event: BaseEvent, **kwargs: Any) -> None:
        self.events.append(event)


@contextmanager
def heard() -> Iterator[list[Any]]:
    handler = Heard()
    # LlamaIndex passes this function on without naming it as its own.
    root = instrument.get_dispatcher()  # type: ignore[attr-defined]  # as said above
    root.event_handlers.append(handler)
    try:
        yield handler.events
    finally:
        root.event_handlers.remove(handler)


def chats(events: list[Any]) -> list[list[ChatMessage]]:
    """The messages of each chat that was begun."""
    return [list(event.messages) for event in events if isinstance(event, LLMChatStartEvent)]
