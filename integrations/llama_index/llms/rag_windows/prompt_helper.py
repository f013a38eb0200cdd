"""LlamaIndex's prompt helper, with passages kept apart."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from llama_index.core.indices.prompt_helper import DEFAULT_PADDING, PromptHelper
from llama_index.core.llms.llm import LLM
from llama_index.core.prompts import BasePromptTemplate
from llama_index.core.tools import BaseTool

from llama_index.llms.rag_windows.llm import RagWindowsLLM
from llama_index.llms.rag_windows.templates import Parts
from rag_windows import Passage
from rag_windows.errors import InputError

logger = logging.getLogger(__name__)


class WindowPromptHelper(PromptHelper):
    """Keeps texts apart where LlamaIndex packs them into one.

    The drop-in for stock classes: ``Settings.prompt_helper = WindowPromptHelper()``, or
    ``prompt_helper=`` of ``get_response_synthesizer``. Texts stay separate inside a ``str``
    subclass (`Parts`), which `RagWindowsLLM` turns into windows; nothing in a text can end its
    window. Nothing is cut: a text too long for one window becomes several, and what exceeds a
    model's positions is refused by the engine.

    Args:
        max_windows: so many texts at most go into one prompt, which bounds memory; more make
            several prompts, which LlamaIndex then refines or summarizes. At least 2. None puts all
            of them into one.
        arguments: of LlamaIndex's `PromptHelper`, for what else is asked of a helper (splitting by
            tree indexes).
        named: likewise.

    Raises:
        InputError: ``max_windows`` is below 2.
    """

    max_windows: int | None = None

    def __init__(self, *arguments: Any, max_windows: int | None = None, **named: Any) -> None:
        if max_windows is not None and max_windows < 2:
            raise InputError(
                f"max_windows must be at least 2, got {max_windows}: summaries of summaries would "
                "never come to an end. Leave it out to read all texts at once."
            )
        super().__init__(*arguments, **named)
        self.max_windows = max_windows

    @classmethod
    def class_name(cls) -> str:
        """Name in serialized form."""
        return "WindowPromptHelper"

    def repack(
        self,
        prompt: BasePromptTemplate,
        text_chunks: Sequence[str],
        padding: int = DEFAULT_PADDING,
        llm: LLM | None = None,
        tools: list[BaseTool] | None = None,
    ) -> list[str]:
        """All texts in one `Parts`, or ``max_windows`` of them in each.

        A chunk that holds parts already (stock classes repack what they packed) gives them back.
        There is always at least one element: with none, LlamaIndex answers "Empty Response"
        without asking the model. For the prompts of another LLM, LlamaIndex's own packing is used.
        """
        if llm is not None and not isinstance(llm, RagWindowsLLM):
            return super().repack(prompt, text_chunks, padding=padding, llm=llm, tools=tools)
        passages = _passages(text_chunks)
        step = self.max_windows or max(1, len(passages))
        return [Parts.of(passages[i : i + step]) for i in range(0, max(1, len(passages)), step)]

    def truncate(
        self,
        prompt: BasePromptTemplate,
        text_chunks: Sequence[str],
        padding: int = DEFAULT_PADDING,
        llm: LLM | None = None,
        tools: list[BaseTool] | None = None,
    ) -> list[str]:
        """The chunks as they are: nothing is cut, and what joined them before stays joined.

        For the prompts of another LLM, LlamaIndex's own cutting is used.
        """
        if llm is not None and not isinstance(llm, RagWindowsLLM):
            return super().truncate(prompt, text_chunks, padding=padding, llm=llm, tools=tools)
        logger.warning(
            "A text is read as part of one prompt, uncut. If it holds passages (the response mode "
            "simple_summarize joins them), use compact, tree_summarize or WindowSynthesizer to "
            "have each in a window of its own."
        )
        return list(text_chunks)


def _passages(chunks: Sequence[str]) -> list[Passage]:
    passages: list[Passage] = []
    for chunk in chunks:
        passages += chunk.passages if isinstance(chunk, Parts) else [Passage(chunk)]
    return passages
