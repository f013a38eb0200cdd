"""The chat model."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, closing
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import LangSmithParams, LanguageModelInput
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable
from langchain_core.tools import BaseTool
from pydantic import ConfigDict

from langchain_rag_windows import structured
from langchain_rag_windows import tools as _tools
from langchain_rag_windows.calls import Call, prepare, watch_of
from langchain_rag_windows.options import EngineOptions
from langchain_rag_windows.results import answer, last_chunk
from langchain_rag_windows.running import finished, streamed
from rag_windows import Chunk, Generation


class ChatRagWindows(EngineOptions, BaseChatModel):
    """A local chat model that reads each document in a window of its own.

    Documents come with ``documents=`` (of ``invoke``, ``stream``, ``bind``, ...), as text-plain
    blocks of a human message, as the artifact of tool messages, or from a stock chain that formats
    them with `WindowDocumentPrompt`; see `conversation`. Without documents it is an ordinary chat
    model. Further keywords of a call are ``method``, ``temperature``, ``top_p``, ``max_tokens``,
    ``seed``, ``timeout``, ``citations``, and any option of ``transformers`` generate.

    The weights are loaded on first use, and shared by all models with equal arguments. Calls that
    are made at once, by tasks or by threads, share forward passes (``batch_rows``). Async calls
    leave the event loop free; cancelling one stops it within a token.

    Example:
        llm = ChatRagWindows(model="tiny-reader")
        answer = llm.invoke("Where was Alra Ashden born?", documents=retriever.invoke(...))
        answer.content; answer.response_metadata["citations"]; answer.content_blocks
    """

    model_config = ConfigDict(extra="forbid")

    @property
    def _llm_type(self) -> str:
        return "rag-windows-chat"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        return self._identity()

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        return self._tracing_params("chat", stop, kwargs)

    def get_token_ids(self, text: str) -> list[int]:
        """Ids of a text in the model's own vocabulary, without special tokens."""
        if self.custom_get_token_ids is not None:
            return self.custom_get_token_ids(text)
        return self._token_ids(text)

    def bind_tools(
        self,
        tools: Sequence[dict[str, Any] | type | Callable[..., Any] | BaseTool],
        *,
        tool_choice: str | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """A model that may call these tools; needs a chat template that knows tools.

        Raises:
            NotImplementedError: the template knows none.
        """
        return _tools.bind(self, tools, tool_choice=tool_choice, **kwargs)

    def with_structured_output(
        self, schema: dict[str, Any] | type, *, include_raw: bool = False, **kwargs: Any
    ) -> Runnable[LanguageModelInput, Any]:
        """A model that answers in the form of a schema.

        Raises:
            NotImplementedError: the chat template knows no tools, which it is done with.
        """
        return structured.with_structured_output(self, schema, include_raw=include_raw, **kwargs)

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        with self.crowd.entered():
            call = prepare(self, messages, stop, kwargs, watch_of(self, kwargs))
            return _result(call, call.whole())

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        watch = watch_of(self, kwargs)
        return await finished(
            self, watch, lambda: prepare(self, messages, stop, kwargs, watch), _result
        )

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        call = prepare(self, messages, stop, kwargs, watch_of(self, kwargs))
        with closing(call.pieces()) as chunks:
            for piece in (piece for chunk in chunks for piece in _chunks(call, chunk)):
                if run_manager is not None:
                    run_manager.on_llm_new_token(piece.text, chunk=piece)
                yield piece

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        watch = watch_of(self, kwargs)
        pieces = streamed(
            self, watch, lambda: prepare(self, messages, stop, kwargs, watch), _chunks
        )
        async with aclosing(pieces):
            async for piece in pieces:
                if run_manager is not None:
                    await run_manager.on_llm_new_token(piece.text, chunk=piece)
                yield piece


def _result(call: Call, best: Generation) -> ChatResult:
    generations = []
    for generation in (best, *best.alternatives):
        parsed = call.reader.whole(generation)
        message = answer(parsed, generation, call.metadata(generation))
        generations.append(ChatGeneration(message=message))
    return ChatResult(generations=generations)


def _chunks(call: Call, chunk: Chunk) -> Iterator[ChatGenerationChunk]:
    text = call.reader.feed(chunk.text)
    if text:
        yield ChatGenerationChunk(message=AIMessageChunk(content=text))
    if chunk.generation is not None:
        rest = call.reader.last(chunk.generation)
        last = last_chunk(rest, chunk.generation, call.metadata(chunk.generation))
        yield ChatGenerationChunk(message=last)
