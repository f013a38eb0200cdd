"""Texts that stay apart where LlamaIndex hands strings around."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Self

from llama_index.core.base.llms.types import ChatMessage

from rag_windows import Passage
from rag_windows.integration import PassageLike


class Parts(str):
    """Several passages as one string.

    Every other LLM sees the texts with a blank line between; `RagWindowsLLM` reads ``passages``,
    each in a window of its own. What makes a plain string of it (``strip``, ``format``, ``+``)
    loses the parts.

    Attributes:
        passages: in order.
    """

    passages: tuple[Passage, ...] = ()

    @classmethod
    def of(cls, passages: Iterable[PassageLike]) -> Self:
        """Join passages.

        Raises:
            InputError: one of them is no passage, see `Passage.of`.
        """
        kept = tuple(Passage.of(passage) for passage in passages)
        parts = cls("\n\n".join(passage.text for passage in kept))
        parts.passages = kept
        return parts


class WindowedPrompt(str):
    """A prompt string that carries the messages it stands for, with their passages.

    LlamaIndex passes it from a template to ``complete``.
    """

    messages: tuple[ChatMessage, ...] = ()

    @classmethod
    def of(cls, text: str, messages: Sequence[ChatMessage]) -> Self:
        """A prompt that reads ``text`` and stands for ``messages``."""
        prompt = cls(text)
        prompt.messages = tuple(messages)
        return prompt
