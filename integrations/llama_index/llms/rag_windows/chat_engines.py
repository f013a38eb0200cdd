"""LlamaIndex's chat engines with each node in a window of its own."""

from __future__ import annotations

import inspect
from typing import Any, Self, cast

from llama_index.core import Settings
from llama_index.core.chat_engine import CondensePlusContextChatEngine, ContextChatEngine
from llama_index.core.llms import LLM, ChatMessage
from llama_index.core.memory import Memory
from llama_index.core.schema import NodeWithScore

from llama_index.llms.rag_windows.llm import RagWindowsLLM
from llama_index.llms.rag_windows.synthesizer import WindowSynthesizer, as_sources
from rag_windows.errors import InputError


class _OverWindows:
    """What both engines change of LlamaIndex's; it stands before theirs among the bases."""

    _llm: LLM

    @classmethod
    def from_defaults(cls, *args: Any, **kwargs: Any) -> Self:
        """As the base class; without ``memory``, one is made that leaves room in the prompt.

        The base class would make one that fills a prompt; instruction and longest window stand
        there, too.
        """
        make = cast(Any, super()).from_defaults
        arguments = dict(inspect.signature(make).bind(*args, **kwargs).arguments)
        arguments |= arguments.pop("kwargs", {})
        llm = _checked(arguments.get("llm") or Settings.llm)
        if arguments.get("memory") is None:
            arguments["memory"] = Memory.from_defaults(
                chat_history=arguments.get("chat_history") or [],
                token_limit=llm.metadata.context_window // 2,
            )
        return cast(Self, make(**{**arguments, "llm": llm}))

    def _get_nodes(self, message: str) -> list[NodeWithScore]:
        return list(as_sources(cast(Any, super())._get_nodes(message)))

    async def _aget_nodes(self, message: str) -> list[NodeWithScore]:
        return list(as_sources(await cast(Any, super())._aget_nodes(message)))

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


# The base classes promise the synthesizer that they make, and use what every one has.
class WindowContextChatEngine(_OverWindows, ContextChatEngine):  # type: ignore[misc] # as said
    """`ContextChatEngine` over windows; make one with ``from_defaults``, with its arguments.

    The context template and the system prompt are what every window reads first; the conversation
    comes behind the windows. There is one answer over all nodes, so the refine template is not
    used. The response's ``source_nodes`` carry their attention mass, as with `WindowSynthesizer`.

    Raises:
        InputError: the LLM is no `RagWindowsLLM`; or, at the first message, a template can't be
            used, see `WindowSynthesizer`.
    """


class WindowCondensePlusContextChatEngine(  # type: ignore[misc] # as above
    _OverWindows, CondensePlusContextChatEngine
):
    """`CondensePlusContextChatEngine` over windows; make one with ``from_defaults``.

    As `WindowContextChatEngine`, with nodes retrieved for the condensed question.
    """


def _checked(llm: LLM) -> RagWindowsLLM:
    if not isinstance(llm, RagWindowsLLM):
        raise InputError(
            f"This chat engine needs a RagWindowsLLM, not {type(llm).__name__}; pass it as llm=."
        )
    return llm
