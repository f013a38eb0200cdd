"""The LLM: LlamaIndex's whole interface over one windowed model."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from contextlib import aclosing, closing
from dataclasses import replace
from typing import Any, TypeVar

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
from llama_index.core.llms.llm import ToolSelection
from llama_index.core.tools.types import BaseTool

from llama_index.llms.rag_windows.questions import Question, read_chat, read_prompt, surfacing
from llama_index.llms.rag_windows.responses import as_raw, chat_piece, chat_response, shown
from llama_index.llms.rag_windows.settings import Settings
from llama_index.llms.rag_windows.streams import areported, reported
from llama_index.llms.rag_windows.template_calls import TemplateCalls
from llama_index.llms.rag_windows.tools import definitions, selections
from rag_windows import Chunk, Generation
from rag_windows.errors import InputError
from rag_windows.integration import (
    AnswerReader,
    Call,
    ToolAnswer,
    method_of,
    warn_without_windows,
)

T = TypeVar("T")

_INSTEAD = (
    "index.as_query_engine(llm=llm, response_synthesizer=WindowSynthesizer(llm)), or "
    "llm.chat(messages, nodes=nodes)."
)

_BETWEEN = frozenset(
    (
        "asyncio",
        "concurrent",
        "contextlib",
        "functools",
        "llama_index",
        "llama_index_instrumentation",
        "pydantic",
        "rag_windows",
        "threading",
        "workflows",
    )
)
"""Packages whose frames stand between a user's line and ours."""


class RagWindowsLLM(TemplateCalls):
    """A local Hugging Face model that reads each passage in a window of its own.

    Passages come with a call, one of these ways: ``nodes=`` (LlamaIndex nodes), ``passages=``
    (`Passage`, strings or mappings), `CitableBlock` in a message, or by `WindowPromptHelper` from
    LlamaIndex's own synthesizers and engines. Without any it is an ordinary chat model. Calls that
    are made at once, by tasks or by threads, share forward passes (``batch_rows``). Options of
    a call (``method``, ``temperature``, ``top_p``, ``max_tokens``, ``stop``, ``seed``,
    ``on_encoded``, any option of transformers' ``generate``) go before those of the constructor; a
    name that nobody knows is a ``TypeError``.

    Tools are shown, called and answered by the model's own chat template, where it knows tools
    (``metadata.is_function_calling_model``): ``chat_with_tools``, ``predict_and_call`` and their
    asynchronous and streaming forms, `FunctionAgent` and `AgentWorkflow`. ``chat`` takes them as
    ``tools``, ``tool_choice`` and ``parallel_tool_calls``.

    A chat answer holds a `CitationBlock` for each passage that carried it, and a `ToolCallBlock`
    for each call. ``raw`` of an answer,
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

    def get_tool_calls_from_response(
        self, response: ChatResponse, error_on_no_tool_call: bool = True, **kwargs: Any
    ) -> list[ToolSelection]:
        """The calls in an answer.

        Raises:
            GenerationError: there is none, and ``error_on_no_tool_call``.
        """
        return selections(response, required=error_on_no_tool_call)

    def _prepare_chat_with_tools(
        self,
        tools: Sequence[BaseTool],
        user_msg: str | ChatMessage | None = None,
        chat_history: list[ChatMessage] | None = None,
        verbose: bool = False,
        allow_parallel_tool_calls: bool = False,
        tool_required: bool = False,
        tool_choice: Any = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        messages = list(chat_history or [])
        if user_msg is not None:
            if isinstance(user_msg, str):
                user_msg = ChatMessage(role="user", content=user_msg)
            messages.append(user_msg)
        if tool_choice is None and tool_required:
            tool_choice = "required"
        return {
            "messages": messages,
            "tools": tools,
            "tool_choice": tool_choice,
            "parallel_tool_calls": allow_parallel_tool_calls,
            **kwargs,
        }

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
        tools, choice = chosen.pop("tools", None), chosen.pop("tool_choice", None)
        reader = None
        with surfacing():
            if tools:
                source, known = self._source, definitions(tools)
                reader = AnswerReader.of(
                    source.tokenizer(), source.template_kwargs(), known, choice
                )
            question = read_chat(messages, self.system_prompt, chosen, reader)
            self._warn_of_a_long_prompt(question)
            return question

    def _read_prompt(self, prompt: str, options: dict[str, Any]) -> Question:
        chosen = self._options(options)
        if chosen.get("tools"):
            raise InputError("A completion calls no tools; use chat, or chat_with_tools.")
        for name in ("tools", "tool_choice", "parallel_tool_calls"):
            chosen.pop(name, None)
        with surfacing():
            question = read_prompt(prompt, self.system_prompt, chosen)
            self._warn_of_a_long_prompt(question)
            return question

    def _warn_of_a_long_prompt(self, question: Question) -> None:
        if question.passages:
            return
        said = question.query
        text = "\n".join((said.system, *(turn.content for turn in said.turns)))
        warn_without_windows(text, self._count, _INSTEAD, _BETWEEN)

    def _count(self, text: str) -> int:
        return len(self._source.tokenizer()(text, add_special_tokens=False)["input_ids"])

    def _prepare(self, question: Question) -> Callable[[], Call]:
        return lambda: Call(
            lm=self._source.lm(),
            query=question.query,
            passages=question.passages,
            options=question.options,
        )

    def _generate(self, question: Question) -> Generation:
        with surfacing():
            return self._source.calls.answer(self._prepare(question), lambda _, made: made)

    async def _agenerate(self, question: Question) -> Generation:
        prepare = self._prepare(question)
        with surfacing():
            return await self._source.calls.answer_async(prepare, lambda _, made: made)

    def _pieces(self, question: Question, piece: Callable[[Chunk], T]) -> Generator[T, None, None]:
        with surfacing():
            stream = self._source.calls.stream(
                self._prepare(question), lambda _, chunk: [piece(chunk)]
            )

        def pieces() -> Generator[T, None, None]:
            with closing(stream), surfacing():
                yield from stream

        return pieces()

    async def _apieces(
        self, question: Question, piece: Callable[[Chunk], T]
    ) -> AsyncGenerator[T, None]:
        prepare = self._prepare(question)
        pieces = self._source.calls.stream_async(prepare, lambda _, chunk: [piece(chunk)])
        async with aclosing(pieces):
            with surfacing():
                async for one in pieces:
                    yield one

    def _chat_response(
        self, generation: Generation, question: Question, answer: ToolAnswer | None = None
    ) -> ChatResponse:
        if answer is None:
            answer = shown(question.reader.whole(generation), parallel=question.parallel)
        raw = self._raw(generation, question)
        return chat_response(generation, answer, question.passages, raw)

    def _raw(self, generation: Generation, question: Question) -> dict[str, Any]:
        options = question.options
        chosen = options.get("method")
        method = method_of(
            self.lm.method if chosen is None else chosen,
            link_tokens=options.get("link_tokens"),
            link_choose=options["link_choose"],
        )
        return as_raw(generation, question.passages, self.model_name, method)

    def _chat_piece(self, question: Question) -> Callable[[Chunk], ChatResponse]:
        text = ""

        def piece(chunk: Chunk) -> ChatResponse:
            nonlocal text
            delta = question.reader.feed(chunk.text)
            text += delta
            if chunk.generation is None:
                return chat_piece(text, delta)
            rest = shown(question.reader.last(chunk.generation), parallel=question.parallel)
            answer = replace(rest, text=text + rest.text)
            response = self._chat_response(chunk.generation, question, answer)
            response.delta = delta + rest.text
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
