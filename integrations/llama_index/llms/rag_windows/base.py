"""The LLM: LlamaIndex's whole interface over one windowed model."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from contextlib import aclosing, closing
from typing import Any, TypeVar, cast

from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    ChatResponseAsyncGen,
    ChatResponseGen,
    CompletionResponse,
    CompletionResponseAsyncGen,
    CompletionResponseGen,
)
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback

from llama_index.llms.rag_windows import async_bridge
from llama_index.llms.rag_windows.questions import Question, read_chat, read_prompt, surfacing
from llama_index.llms.rag_windows.responses import as_raw, chat_piece, chat_response
from llama_index.llms.rag_windows.serializing import read_method
from llama_index.llms.rag_windows.settings import Settings
from llama_index.llms.rag_windows.streams import areported, reported
from llama_index.llms.rag_windows.template_calls import TemplateCalls
from rag_windows import Chunk, Generation
from rag_windows.rescaling import linked

T = TypeVar("T")


class RagWindowsLLM(TemplateCalls):
    """A local Hugging Face model that reads each passage in a window of its own.

    Passages come with a call, one of these ways: ``nodes=`` (LlamaIndex nodes), ``passages=``
    (`Passage`, strings or mappings), `CitableBlock` in a message, or by `WindowPromptHelper` from
    LlamaIndex's own synthesizers and engines. Without any it is an ordinary chat model. Calls that
    are made at once, by tasks or by threads, share forward passes (``batch_rows``). Options of
    a call (``method``, ``temperature``, ``top_p``, ``max_tokens``, ``stop``, ``seed``,
    ``on_encoded``, any option of transformers' ``generate``) go before those of the constructor; a
    name that nobody knows is a ``TypeError``.

    A chat answer holds a `CitationBlock` for each passage that carried it. ``raw`` of an answer,
    and of a stream's last piece, is JSON, see `responses.as_raw`. The weights are loaded at the
    first call, and shared by all LLMs with equal arguments.

    Errors are `RagWindowsError`, so LlamaIndex's synthesizers let them through to the caller.
    """

    # Type checkers make up a constructor of the fields for each class that has none of its own.
    __init__ = Settings.__init__

    @classmethod
    def class_name(cls) -> str:
        """Name in serialized form."""
        return "RagWindowsLLM"

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Answer the last message of a conversation."""
        question = self._read_chat(messages, kwargs)
        return self._chat_response(self._generate(question), question)

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """Answer a prompt; ``formatted`` is of no account, the chat template is always used."""
        question = self._read_prompt(prompt, kwargs)
        generation = self._generate(question)
        return CompletionResponse(text=generation.text, raw=self._raw(generation, question))

    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        """`chat` piece by piece; closing the stream stops the work."""
        make = type(self)._chat_pieces
        return reported(llm_chat_callback(), make, self, messages, **kwargs)

    def stream_complete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponseGen:
        """`complete` piece by piece; closing the stream stops the work."""
        make = type(self)._completion_pieces
        return reported(llm_completion_callback(), make, self, prompt, **kwargs)

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """`chat` beside the event loop; cancelling stops it within a token."""
        question = self._read_chat(messages, kwargs)
        return self._chat_response(await self._agenerate(question), question)

    @llm_completion_callback()
    async def acomplete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponse:
        """`complete` beside the event loop; cancelling stops it within a token."""
        question = self._read_prompt(prompt, kwargs)
        generation = await self._agenerate(question)
        return CompletionResponse(text=generation.text, raw=self._raw(generation, question))

    async def astream_chat(
        self, messages: Sequence[ChatMessage], **kwargs: Any
    ) -> ChatResponseAsyncGen:
        """`stream_chat` beside the event loop; closing or cancelling stops it within a token."""
        make = type(self)._achat_pieces
        return await areported(llm_chat_callback(), make, self, messages, **kwargs)

    async def astream_complete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponseAsyncGen:
        """`stream_complete` beside the event loop; closing or cancelling stops it."""
        make = type(self)._acompletion_pieces
        return await areported(llm_completion_callback(), make, self, prompt, **kwargs)

    def _chat_pieces(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        question = self._read_chat(messages, kwargs)
        return self._pieces(question, self._chat_piece(question))

    def _completion_pieces(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponseGen:
        question = self._read_prompt(prompt, kwargs)
        return self._pieces(question, self._completion_piece(question))

    def _achat_pieces(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseAsyncGen:
        question = self._read_chat(messages, kwargs)
        return self._apieces(question, self._chat_piece(question))

    def _acompletion_pieces(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponseAsyncGen:
        question = self._read_prompt(prompt, kwargs)
        return self._apieces(question, self._completion_piece(question))

    def _read_chat(self, messages: Sequence[ChatMessage], options: dict[str, Any]) -> Question:
        chosen = self._options(options)
        with surfacing():
            return read_chat(messages, self.system_prompt, chosen)

    def _read_prompt(self, prompt: str, options: dict[str, Any]) -> Question:
        chosen = self._options(options)
        with surfacing():
            return read_prompt(prompt, self.system_prompt, chosen)

    def _generate(self, question: Question) -> Generation:
        crowd = self._source.crowd
        with crowd.entered():
            lm = self._source.lm()
            with surfacing():
                if self.batch_rows == 1:
                    return lm.generate(question.messages, question.passages, **question.options)
                scheduler = lm.shared_scheduler(max_rows=self.batch_rows)
                return scheduler.answer(question.request(question.options), lone=crowd.lone)

    async def _agenerate(self, question: Question) -> Generation:
        return await async_bridge.generate(self._source, question, self.batch_rows)

    def _pieces(self, question: Question, piece: Callable[[Chunk], T]) -> Generator[T, None, None]:
        lm = self._source.lm()
        with surfacing():
            stream = lm.stream(question.messages, question.passages, **question.options)
        chunks = cast("Generator[Chunk, None, None]", stream)

        def pieces() -> Generator[T, None, None]:
            with closing(chunks), surfacing():
                for chunk in chunks:
                    yield piece(chunk)

        return pieces()

    async def _apieces(
        self, question: Question, piece: Callable[[Chunk], T]
    ) -> AsyncGenerator[T, None]:
        pieces = async_bridge.stream(self._source, question, self.batch_rows)
        async with aclosing(pieces) as chunks:
            async for chunk in chunks:
                yield piece(chunk)

    def _chat_response(self, generation: Generation, question: Question) -> ChatResponse:
        return chat_response(generation, question.passages, self._raw(generation, question))

    def _raw(self, generation: Generation, question: Question) -> dict[str, Any]:
        options = question.options
        chosen = options.get("method")
        method = linked(
            self.lm.method if chosen is None else read_method(chosen),
            options.get("link_tokens"),
            options["link_choose"],
        )
        return as_raw(generation, question.passages, self.model_name, method)

    def _chat_piece(self, question: Question) -> Callable[[Chunk], ChatResponse]:
        text = ""

        def piece(chunk: Chunk) -> ChatResponse:
            nonlocal text
            text += chunk.text
            if chunk.generation is None:
                return chat_piece(text, chunk.text)
            response = self._chat_response(chunk.generation, question)
            response.delta = chunk.text
            return response

        return piece

    def _completion_piece(self, question: Question) -> Callable[[Chunk], CompletionResponse]:
        text = ""

        def piece(chunk: Chunk) -> CompletionResponse:
            nonlocal text
            text += chunk.text
            whole = chunk.generation
            raw = None if whole is None else self._raw(whole, question)
            return CompletionResponse(text=text, delta=chunk.text, raw=raw)

        return piece
