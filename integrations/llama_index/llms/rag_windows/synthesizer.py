"""Answers over nodes, each node in a window of its own."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, TypeVar

import llama_index.core.instrumentation as instrument
from llama_index.core.base.llms.types import ChatResponseAsyncGen, ChatResponseGen
from llama_index.core.base.response.schema import RESPONSE_TYPE
from llama_index.core.bridge.pydantic import BaseModel, ValidationError
from llama_index.core.callbacks import CallbackManager
from llama_index.core.instrumentation.events.synthesis import (
    GetResponseEndEvent,
    GetResponseStartEvent,
)
from llama_index.core.llms import ChatMessage, ChatResponse
from llama_index.core.output_parsers import PydanticOutputParser
from llama_index.core.prompts import BasePromptTemplate
from llama_index.core.prompts.default_prompt_selectors import DEFAULT_TEXT_QA_PROMPT_SEL
from llama_index.core.prompts.mixin import PromptDictType
from llama_index.core.response_synthesizers import BaseSynthesizer
from llama_index.core.schema import NodeWithScore, QueryType
from llama_index.core.types import RESPONSE_TEXT_TYPE, TokenAsyncGen, TokenGen

from llama_index.llms.rag_windows.llm import RagWindowsLLM
from llama_index.llms.rag_windows.prompt_helper import WindowPromptHelper
from llama_index.llms.rag_windows.source_nodes import SourceNode, as_sources, note_answer
from llama_index.llms.rag_windows.templates import Parts, checked_template, window_messages
from rag_windows.errors import GenerationError, InputError

Model = TypeVar("Model", bound=BaseModel)

_SHOWN = 200
"""Characters of a wrong answer that an error shows."""

# LlamaIndex passes this function on without naming it as its own.
dispatcher = instrument.get_dispatcher(__name__)  # type: ignore[attr-defined]  # as said above


class WindowSynthesizer(BaseSynthesizer):
    """Reads every node in a window of its own and answers once.

    Use it as ``response_synthesizer=`` of any query engine. The response's source nodes are copies
    (`SourceNode`) of the nodes with ids, scores and metadata kept; their metadata tells under
    "attention_mass" what share of the attention each got while the answer was written (for a
    stream: once it is through), and under "rag_windows_note" why a node made no window or several.

    Args:
        llm: reads the windows.
        text_qa_template: its fixed text becomes the instruction that all windows share; the
            question is asked behind them. It must hold ``{query_str}`` and ``{context_str}``, the
            place that passages would have in one prompt.
        streaming: answer piece by piece.
        output_cls: answer as an object of this pydantic class; not with ``streaming``.
        callback_manager: for LlamaIndex's callbacks; given to the LLM too, as LlamaIndex does it.
        empty_response: what is answered, without asking the model, if there are no nodes.
        chat_history: turns before the question, read as they are.

    Raises:
        InputError: the LLM can't read windows, the template would drop the question or the nodes
            or leave a variable unfilled, or ``output_cls`` was combined with ``streaming``.
    """

    _llm: RagWindowsLLM

    def __init__(
        self,
        llm: RagWindowsLLM,
        *,
        text_qa_template: BasePromptTemplate | None = None,
        streaming: bool = False,
        output_cls: type[BaseModel] | None = None,
        callback_manager: CallbackManager | None = None,
        empty_response: str | None = None,
        chat_history: Sequence[ChatMessage] = (),
    ) -> None:
        if not isinstance(llm, RagWindowsLLM):
            raise InputError(
                f"WindowSynthesizer needs a RagWindowsLLM, not {type(llm).__name__}. For answers "
                "of a pydantic class give it the plain LLM and output_cls=."
            )
        super().__init__(
            llm=llm,
            callback_manager=callback_manager,
            prompt_helper=WindowPromptHelper(),
            streaming=streaming,
            output_cls=output_cls,
            empty_response=empty_response,
        )
        self._text_qa_template = checked_template(
            text_qa_template or DEFAULT_TEXT_QA_PROMPT_SEL, llm
        )
        self._chat_history = tuple(chat_history)
        self._check_streaming()

    def _get_prompts(self) -> PromptDictType:
        return {"text_qa_template": self._text_qa_template}

    def _update_prompts(self, prompts: PromptDictType) -> None:
        if "text_qa_template" in prompts:
            self._text_qa_template = checked_template(prompts["text_qa_template"], self._llm)

    def synthesize(
        self,
        query: QueryType,
        nodes: list[NodeWithScore],
        additional_source_nodes: Sequence[NodeWithScore] | None = None,
        **response_kwargs: Any,
    ) -> RESPONSE_TYPE:
        """Answer a query over nodes; further arguments go to the LLM's chat."""
        sources = as_sources(nodes)
        # Without the span that LlamaIndex put around it: this method has one already.
        call: Any = inspect.unwrap(BaseSynthesizer.synthesize)
        response: RESPONSE_TYPE = call(
            self, query, list(sources), additional_source_nodes, sources=sources, **response_kwargs
        )
        return response

    async def asynthesize(
        self,
        query: QueryType,
        nodes: list[NodeWithScore],
        additional_source_nodes: Sequence[NodeWithScore] | None = None,
        **response_kwargs: Any,
    ) -> RESPONSE_TYPE:
        """Like `synthesize`, without blocking the event loop."""
        sources = as_sources(nodes)
        call: Any = inspect.unwrap(BaseSynthesizer.asynthesize)
        response: RESPONSE_TYPE = await call(
            self, query, list(sources), additional_source_nodes, sources=sources, **response_kwargs
        )
        return response

    def get_response(
        self,
        query_str: str,
        text_chunks: Sequence[str],
        *,
        sources: Sequence[SourceNode] | None = None,
        **response_kwargs: Any,
    ) -> RESPONSE_TEXT_TYPE:
        """Answer over texts, or over the ``sources`` that they were taken from."""
        messages, options = self._asked(query_str, text_chunks, sources)
        options |= response_kwargs
        result: RESPONSE_TEXT_TYPE
        if self._streaming:
            result = _tokens(self._llm.stream_chat(messages, **options), sources)
        else:
            result = self._read(self._llm.chat(messages, **options), sources)
        dispatcher.event(GetResponseEndEvent())
        return result

    async def aget_response(
        self,
        query_str: str,
        text_chunks: Sequence[str],
        *,
        sources: Sequence[SourceNode] | None = None,
        **response_kwargs: Any,
    ) -> RESPONSE_TEXT_TYPE:
        """Like `get_response`, without blocking the event loop."""
        messages, options = self._asked(query_str, text_chunks, sources)
        options |= response_kwargs
        result: RESPONSE_TEXT_TYPE
        if self._streaming:
            result = _atokens(await self._llm.astream_chat(messages, **options), sources)
        else:
            result = self._read(await self._llm.achat(messages, **options), sources)
        dispatcher.event(GetResponseEndEvent())
        return result

    def _asked(
        self, query_str: str, text_chunks: Sequence[str], sources: Sequence[SourceNode] | None
    ) -> tuple[list[ChatMessage], dict[str, Any]]:
        """Messages and options of the chat that answers."""
        self._check_streaming()
        dispatcher.event(GetResponseStartEvent(query_str=query_str, text_chunks=list(text_chunks)))
        slot = {"context_str": Parts.of([]), "query_str": query_str}
        messages = window_messages(self._text_qa_template, slot, self._llm)
        # Not part of the template: braces in what people said are no variables.
        messages = [*messages[:-1], *self._chat_history, messages[-1]]
        if self._llm.output_parser is not None:
            messages = self._llm.output_parser.format_messages(messages)
        if self._output_cls is not None:
            # It goes into the system message if there is one: the question stays as it is.
            copies = [message.model_copy(deep=True) for message in messages]
            messages = PydanticOutputParser(output_cls=self._output_cls).format_messages(copies)
        windows = {"passages": list(text_chunks)} if sources is None else {"nodes": list(sources)}
        return self._llm._extend_messages(messages), windows

    def _read(
        self, response: ChatResponse, sources: Sequence[SourceNode] | None
    ) -> str | BaseModel:
        note_answer(sources or (), response)
        text = response.message.content or ""
        if self._output_cls is not None:
            return _parsed(self._output_cls, text)
        return self._llm._parse_output(text)

    def _check_streaming(self) -> None:
        # Asked at every call: LlamaIndex's chat engines switch streaming on and off.
        if self._streaming and (self._output_cls or self._llm.output_parser) is not None:
            raise InputError(
                "What output_cls or the LLM's output_parser make of a whole answer can't be "
                "streamed; use streaming=False, or leave them out."
            )


def _tokens(stream: ChatResponseGen, sources: Sequence[SourceNode] | None) -> TokenGen:
    try:
        for response in stream:
            note_answer(sources or (), response)
            yield response.delta or ""
    finally:
        stream.close()


async def _atokens(
    stream: ChatResponseAsyncGen, sources: Sequence[SourceNode] | None
) -> TokenAsyncGen:
    try:
        async for response in stream:
            note_answer(sources or (), response)
            yield response.delta or ""
    finally:
        await stream.aclose()


def _parsed(output_cls: type[Model], text: str) -> Model:
    """The object that an answer spells.

    Raises:
        GenerationError: it spells none. Not a ``ValueError``: LlamaIndex's refine step would turn
            that into an empty response.
    """
    try:
        found = PydanticOutputParser(output_cls=output_cls).parse(text)
    except (ValidationError, ValueError, TypeError) as error:
        shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
        raise GenerationError(
            f"The model did not answer with JSON of {output_cls.__name__}: {shown!r}. Use a model "
            "that was trained for structured answers, raise max_new_tokens if the answer was cut "
            "off, or ask for text (without output_cls)."
        ) from error
    if not isinstance(found, output_cls):
        raise GenerationError(
            f"The answer was read as {type(found).__name__}, not {output_cls.__name__}."
        )
    return found
