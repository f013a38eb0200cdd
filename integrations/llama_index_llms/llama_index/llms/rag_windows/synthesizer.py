"""Answers and conversations over nodes, each in a window whose attention share is reported."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing, closing, suppress
from typing import Any, Self, cast

import llama_index.core.instrumentation as instrument
from llama_index.core import Settings
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.base.llms.types import ChatResponseAsyncGen, ChatResponseGen
from llama_index.core.base.response.schema import RESPONSE_TYPE
from llama_index.core.bridge.pydantic import BaseModel, ValidationError
from llama_index.core.callbacks import CallbackManager
from llama_index.core.chat_engine import CondensePlusContextChatEngine, ContextChatEngine
from llama_index.core.indices.prompt_helper import PromptHelper
from llama_index.core.instrumentation.events.synthesis import (
    GetResponseEndEvent,
    GetResponseStartEvent,
)
from llama_index.core.llms import ChatMessage, ChatResponse
from llama_index.core.llms.llm import LLM
from llama_index.core.memory import BaseMemory, Memory
from llama_index.core.output_parsers import PydanticOutputParser
from llama_index.core.prompts import BasePromptTemplate
from llama_index.core.prompts.default_prompt_selectors import DEFAULT_TEXT_QA_PROMPT_SEL
from llama_index.core.prompts.mixin import PromptDictType
from llama_index.core.response_synthesizers import BaseSynthesizer
from llama_index.core.schema import NodeWithScore, QueryType
from llama_index.core.types import RESPONSE_TEXT_TYPE, TokenAsyncGen, TokenGen

from llama_index.llms.rag_windows.llm import RagWindowsLLM
from llama_index.llms.rag_windows.nodes import as_sources, note
from llama_index.llms.rag_windows.templates import Parts, WindowTemplate, checked_template
from rag_windows import Passage
from rag_windows.errors import GenerationError, InputError
from rag_windows.integration import check_schema, schemas_available

dispatcher = instrument.get_dispatcher(__name__)  # type: ignore[attr-defined]  # LlamaIndex passes it on without naming it as its own


class WindowPromptHelper(PromptHelper):
    """Keeps texts separate where LlamaIndex packs them into one.

    The drop-in for stock classes: ``Settings.prompt_helper = WindowPromptHelper()``, or
    ``prompt_helper=`` of ``get_response_synthesizer``. Texts stay separate inside a ``str``
    subclass (`Parts`), which `RagWindowsLLM` turns into windows; nothing in a text can end its
    window. Nothing is cut: a text too long for one window becomes several, and what exceeds a
    model's positions is refused by the engine. For the prompts of another LLM, LlamaIndex's own
    packing and cutting are used.

    Args:
        max_windows: so many texts at most go into one prompt, which bounds memory; more make
            several prompts, which LlamaIndex then refines or summarizes. At least 2. None puts all
            of them into one.
        options: of LlamaIndex's `PromptHelper`, for what else is asked of a helper.

    Raises:
        InputError: ``max_windows`` is below 2.
    """

    max_windows: int | None = None

    def __init__(self, *args: Any, max_windows: int | None = None, **options: Any) -> None:
        if max_windows is not None and max_windows < 2:
            raise InputError(
                f"max_windows must be at least 2, not {max_windows}, or summaries of summaries "
                "would never end. Leave it out to read all texts at once."
            )
        super().__init__(*args, **options)
        self.max_windows = max_windows

    def repack(
        self, prompt: BasePromptTemplate, text_chunks: Sequence[str], *args: Any, **options: Any
    ) -> list[str]:
        """All texts in one `Parts`, or ``max_windows`` of them in each.

        There is always at least one element: with none, LlamaIndex answers "Empty Response"
        without asking the model.
        """
        if not isinstance(options.get("llm"), RagWindowsLLM | None):
            return super().repack(prompt, text_chunks, *args, **options)
        passages: list[Passage] = []
        for chunk in text_chunks:
            passages += chunk.passages if isinstance(chunk, Parts) else [Passage(chunk)]
        step = self.max_windows or max(1, len(passages))
        return [Parts.of(passages[i : i + step]) for i in range(0, max(1, len(passages)), step)]

    def truncate(
        self, prompt: BasePromptTemplate, text_chunks: Sequence[str], *args: Any, **options: Any
    ) -> list[str]:
        """The chunks as they are: nothing is cut, and what joined them before stays joined."""
        if not isinstance(options.get("llm"), RagWindowsLLM | None):
            return super().truncate(prompt, text_chunks, *args, **options)
        return list(text_chunks)


class WindowSynthesizer(BaseSynthesizer):
    """Reads every node in a window of its own and answers once.

    Use it as ``response_synthesizer=`` of any query engine. The response's source nodes are copies
    (`SourceNode`) of the nodes with their ids, scores and metadata. In addition, the metadata has
    "attention_mass", the share of the attention that a node got while the answer was written (in a
    stream at its end), "answer_statements", the sentences that it carried, and "rag_windows_note"
    where a node made no window or several; with ``citations="removal"`` of the LLM also
    "answer_drop" and "answer_supports", see `rag_windows.Citation`.

    Args:
        llm: reads the windows.
        text_qa_template: its fixed text becomes the instruction that all windows share; the
            question is asked behind them. It must hold ``{query_str}`` and ``{context_str}``, the
            place that passages would have in one prompt.
        streaming: answer piece by piece.
        output_cls: answer as an object of this pydantic class; not with ``streaming``. With the
            extra ``structured`` the answer is held to its schema, where llguidance knows all of it.
        callback_manager: for LlamaIndex's callbacks; given to the LLM too, as LlamaIndex does it.
        empty_response: the answer, without asking the model, if there are no nodes.
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
        super().__init__(
            llm=_checked(llm),
            callback_manager=callback_manager,
            prompt_helper=WindowPromptHelper(),
            streaming=streaming,
            output_cls=output_cls,
            empty_response=empty_response,
        )
        self._update_prompts({"text_qa_template": text_qa_template or DEFAULT_TEXT_QA_PROMPT_SEL})
        self._chat_history = tuple(chat_history)
        self._check_streaming()

    def _get_prompts(self) -> PromptDictType:
        return {"text_qa_template": self._text_qa_template}

    def _update_prompts(self, prompts: PromptDictType) -> None:
        if "text_qa_template" in prompts:
            self._text_qa_template = checked_template(prompts["text_qa_template"], self._llm)

    def synthesize(
        self, query: QueryType, nodes: list[NodeWithScore], *args: Any, **options: Any
    ) -> RESPONSE_TYPE:
        """Answer a query over nodes; further options go to the LLM's chat."""
        sources = as_sources(nodes)
        return super().synthesize(query, sources, *args, **{"sources": sources, **options})

    async def asynthesize(
        self, query: QueryType, nodes: list[NodeWithScore], *args: Any, **options: Any
    ) -> RESPONSE_TYPE:
        """Like `synthesize`, without blocking the event loop."""
        sources = as_sources(nodes)
        return await super().asynthesize(query, sources, *args, **{"sources": sources, **options})

    def get_response(
        self, query_str: str, text_chunks: Sequence[str], **response_kwargs: Any
    ) -> RESPONSE_TEXT_TYPE:
        """Answer over texts, or over the ``sources`` that they were taken from."""
        messages, sources, options = self._asked(query_str, text_chunks, **response_kwargs)
        result: RESPONSE_TEXT_TYPE
        if self._streaming:
            result = _tokens(self._llm.stream_chat(messages, **options), sources)
        else:
            result = self._read(self._llm.chat(messages, **options), sources)
        dispatcher.event(GetResponseEndEvent())
        return result

    async def aget_response(
        self, query_str: str, text_chunks: Sequence[str], **response_kwargs: Any
    ) -> RESPONSE_TEXT_TYPE:
        """Like `get_response`, without blocking the event loop."""
        messages, sources, options = self._asked(query_str, text_chunks, **response_kwargs)
        result: RESPONSE_TEXT_TYPE
        if self._streaming:
            result = _atokens(await self._llm.astream_chat(messages, **options), sources)
        else:
            result = self._read(await self._llm.achat(messages, **options), sources)
        dispatcher.event(GetResponseEndEvent())
        return result

    def _asked(
        self,
        query_str: str,
        text_chunks: Sequence[str],
        sources: Sequence[NodeWithScore] | None = None,
        **options: Any,
    ) -> tuple[Sequence[ChatMessage], Sequence[NodeWithScore] | None, dict[str, Any]]:
        """Messages, sources and options of the chat that answers."""
        self._check_streaming()
        dispatcher.event(GetResponseStartEvent(query_str=query_str, text_chunks=list(text_chunks)))
        slot = {"context_str": Parts.of([]), "query_str": query_str}
        template = WindowTemplate.of(self._text_qa_template, slot, self._llm)
        messages = template.format_messages(self._llm)
        # Not part of the template: braces in what people said are no variables.
        messages = [*messages[:-1], *self._chat_history, messages[-1]]
        if self._llm.output_parser is not None:
            messages = self._llm.output_parser.format_messages(messages)
        if self._output_cls is not None:
            # It goes into the system message if there is one: the question stays as it is.
            copies = [message.model_copy(deep=True) for message in messages]
            messages = PydanticOutputParser(output_cls=self._output_cls).format_messages(copies)
            options = {**self._form(), **options}
        windows = {"passages": list(text_chunks)} if sources is None else {"nodes": list(sources)}
        return self._llm._extend_messages(messages), sources, {**windows, **options}

    def _form(self) -> dict[str, Any]:
        """What holds an answer to the schema of ``output_cls``, where it can be held."""
        if self._output_cls is None or not schemas_available():
            return {}
        schema = self._output_cls.model_json_schema()
        with suppress(InputError):  # the answer is checked when it is read
            check_schema(schema)
            return {"json_schema": schema}
        return {}

    def _read(
        self, response: ChatResponse, sources: Sequence[NodeWithScore] | None
    ) -> str | BaseModel:
        """The text of an answer, or the object that it spells."""
        note(sources, response)
        text = response.message.content or ""
        if self._output_cls is None:
            return self._llm._parse_output(text)
        try:
            found = PydanticOutputParser(output_cls=self._output_cls).parse(text)
        except (ValidationError, ValueError, TypeError) as error:
            raise GenerationError(
                f"The model did not answer with JSON for {self._output_cls.__name__}: "
                f"{text[:200]!r}. Use a model that was trained for structured answers, raise "
                "max_new_tokens if the answer was cut off, or ask for text (without output_cls)."
            ) from error
        read: BaseModel = found
        return read

    def _check_streaming(self) -> None:
        # Asked at every call: LlamaIndex's chat engines switch streaming on and off.
        if self._streaming and (self._output_cls or self._llm.output_parser) is not None:
            raise InputError(
                "An answer with output_cls or the LLM's output_parser can't be streamed, because "
                "they need the whole answer. Use streaming=False, or leave them out."
            )


def _tokens(stream: ChatResponseGen, sources: Sequence[NodeWithScore] | None) -> TokenGen:
    with closing(stream):
        for response in stream:
            note(sources, response)
            yield response.delta or ""


async def _atokens(
    stream: ChatResponseAsyncGen, sources: Sequence[NodeWithScore] | None
) -> TokenAsyncGen:
    async with aclosing(stream):
        async for response in stream:
            note(sources, response)
            yield response.delta or ""


class _OverWindows:
    """What both engines change of LlamaIndex's; it stands before theirs among the bases."""

    _llm: LLM

    @classmethod
    def from_defaults(
        cls,
        retriever: BaseRetriever,
        *,
        llm: LLM | None = None,
        chat_history: list[ChatMessage] | None = None,
        memory: BaseMemory | None = None,
        **kwargs: Any,
    ) -> Self:
        """As the base class, whose memory would fill a prompt; here half stays free for windows."""
        reader = _checked(llm or Settings.llm)
        if memory is None:
            limit = reader.metadata.context_window // 2
            memory = Memory.from_defaults(chat_history=chat_history or [], token_limit=limit)
        arguments = {"llm": reader, "chat_history": chat_history, "memory": memory, **kwargs}
        return cast(Self, cast(Any, super()).from_defaults(retriever, **arguments))

    def _get_nodes(self, message: str) -> list[NodeWithScore]:
        return as_sources(cast(Any, super())._get_nodes(message))

    async def _aget_nodes(self, message: str) -> list[NodeWithScore]:
        return as_sources(await cast(Any, super())._aget_nodes(message))

    def _get_response_synthesizer(
        self, chat_history: list[ChatMessage], streaming: bool = False
    ) -> WindowSynthesizer:
        # The stock synthesizer would take braces in the history for template variables.
        stock = cast(Any, super())._get_response_synthesizer([], streaming)
        return WindowSynthesizer(
            _checked(self._llm),
            text_qa_template=stock.get_prompts()["text_qa_template"],
            streaming=streaming,
            callback_manager=stock.callback_manager,
            chat_history=chat_history,
        )


class WindowContextChatEngine(_OverWindows, ContextChatEngine):  # type: ignore[misc]  # LlamaIndex promises its own synthesizer
    """`ContextChatEngine` over windows; make one with ``from_defaults``, with its arguments.

    The context template and the system prompt are what every window reads first; the conversation
    comes behind the windows. There is one answer over all nodes, so the refine template is not
    used. The response's ``source_nodes`` carry their attention mass, as with `WindowSynthesizer`.

    Raises:
        InputError: the LLM is no `RagWindowsLLM`; or, at the first message, a template can't be
            used, see `WindowSynthesizer`.
    """


class WindowCondensePlusContextChatEngine(  # type: ignore[misc]  # LlamaIndex promises its own synthesizer
    _OverWindows, CondensePlusContextChatEngine
):
    """`CondensePlusContextChatEngine` over windows; make one with ``from_defaults``.

    As `WindowContextChatEngine`, with nodes retrieved for the condensed question.
    """


def _checked(llm: LLM) -> RagWindowsLLM:
    if not isinstance(llm, RagWindowsLLM):
        raise InputError(
            f"llm must be a RagWindowsLLM, not {type(llm).__name__}. For answers of a pydantic "
            "class, give the plain LLM and output_cls= to a WindowSynthesizer."
        )
    return llm
