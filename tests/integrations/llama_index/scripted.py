"""An LLM that reads like ours and says what it is told to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llama_index.core.bridge.pydantic import BaseModel
from llama_index.core.llms import ChatMessage, ChatResponse

from llama_index.llms.rag_windows import RagWindowsLLM


class Year(BaseModel):
    """An answer with a number."""

    year: int


class ScriptedLLM(RagWindowsLLM):
    """Reads its windows, and then says the same thing always."""

    # What a type checker would make up for a pydantic class knows only of its fields.
    __init__ = RagWindowsLLM.__init__

    says: str = ""

    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        response: ChatResponse = super().chat(messages, **kwargs)
        response.message = ChatMessage(role="assistant", content=self.says)
        return response

    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        return self.chat(messages, **kwargs)
