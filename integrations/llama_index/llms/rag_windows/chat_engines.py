"""LlamaIndex's chat engines with each node in a window of its own."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Self, cast

from llama_index.core import Settings
from llama_index.core.chat_engine import CondensePlusContextChatEngine, ContextChatEngine
from llama_index.core.llms import LLM, ChatMessage
from llama_index.core.memory import Memory
from llama_index.core.response_synthesizers import CompactAndRefine
from llama_index.core.schema import NodeWithScore

from llama_index.llms.rag_windows.base import RagWindowsLLM
from llama_index.llms.rag_windows.source_nodes import as_sources
from llama_index.llms.rag_windows.synthesizer import WindowSynthesizer
from rag_windows.errors import InputError


class WindowContextChatEngine(ContextChatEngine):
    """`ContextChatEngine` over windows; make one with ``from_defaults``, with its arguments.

    The context template and the system prompt are what every window reads first; the conversation
    comes behind the windows. There is one answer over all nodes, so the refine template is not
    used. The response's ``source_nodes`` carry their attention mass, as with `WindowSynthesizer`.

    Raises:
        InputError: the LLM is no `RagWindowsLLM`; or, at the first message, a template can't be
            used, see `WindowSynthesizer`.
    """

    @classmethod
    def from_defaults(cls, *args: Any, **kwargs: Any) -> Self:
        """As the base class; without ``memory``, one is made that leaves room in the prompt."""
        arguments = _with_memory(super().from_defaults, args, kwargs)
        return cast(Self, super().from_defaults(**arguments))

    def _get_nodes(self, message: str) -> list[NodeWithScore]:
        return list(as_sources(super()._get_nodes(message)))

    async def _aget_nodes(self, message: str) -> list[NodeWithScore]:
        return list(as_sources(await super()._aget_nodes(message)))

    # The base class promises the class that it makes, and uses what every synthesizer has.
    def _get_response_synthesizer(  # type: ignore[override] # narrower than promised
        self, chat_history: list[ChatMessage], streaming: bool = False
    ) -> WindowSynthesizer:
        # The stock synthesizer would take braces in the history for template variables.
        stock = super()._get_response_synthesizer([], streaming)
        return _windowed(stock, self._llm, chat_history, streaming)


class WindowCondensePlusContextChatEngine(CondensePlusContextChatEngine):
    """`CondensePlusContextChatEngine` over windows; make one with ``from_defaults``.

    As `WindowContextChatEngine`, with nodes retrieved for the condensed question.
    """

    @classmethod
    def from_defaults(cls, *args: Any, **kwargs: Any) -> Self:
        """As the base class; without ``memory``, one is made that leaves room in the prompt."""
        arguments = _with_memory(super().from_defaults, args, kwargs)
        return cast(Self, super().from_defaults(**arguments))

    def _get_nodes(self, message: str) -> list[NodeWithScore]:
        return list(as_sources(super()._get_nodes(message)))

    async def _aget_nodes(self, message: str) -> list[NodeWithScore]:
        return list(as_sources(await super()._aget_nodes(message)))

    # The base class promises the class that it makes, and uses what every synthesizer has.
    def _get_response_synthesizer(  # type: ignore[override] # narrower than promised
        self, chat_history: list[ChatMessage], streaming: bool = False
    ) -> WindowSynthesizer:
        # The stock synthesizer would take braces in the history for template variables.
        stock = super()._get_response_synthesizer([], streaming)
        return _windowed(stock, self._llm, chat_history, streaming)


def _with_memory(
    make: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Arguments of ``from_defaults`` with a memory, where none is given.

    The base class makes one that fills a prompt; instruction and longest window stand there, too.
    """
    arguments = dict(inspect.signature(make).bind(*args, **kwargs).arguments)
    arguments |= arguments.pop("kwargs", {})
    llm = _checked(arguments.get("llm") or Settings.llm)
    if arguments.get("memory") is None:
        arguments["memory"] = Memory.from_defaults(
            chat_history=arguments.get("chat_history") or [],
            token_limit=llm.metadata.context_window // 2,
        )
    return {**arguments, "llm": llm}


def _checked(llm: LLM) -> RagWindowsLLM:
    if not isinstance(llm, RagWindowsLLM):
        raise InputError(
            f"This chat engine needs a RagWindowsLLM, not {type(llm).__name__}; pass it as llm=."
        )
    return llm


def _windowed(
    stock: CompactAndRefine, llm: LLM, chat_history: list[ChatMessage], streaming: bool
) -> WindowSynthesizer:
    return WindowSynthesizer(
        _checked(llm),
        text_qa_template=stock.get_prompts()["text_qa_template"],
        streaming=streaming,
        callback_manager=stock.callback_manager,
        chat_history=chat_history,
    )
