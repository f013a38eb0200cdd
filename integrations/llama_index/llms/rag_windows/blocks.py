"""LlamaIndex's chat messages, read and written."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from llama_index.core.base.llms.types import (
    CachePoint,
    ChatMessage,
    CitableBlock,
    CitationBlock,
    ContentBlock,
    MessageRole,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
)

from llama_index.llms.rag_windows.passages import passage_of_block
from llama_index.llms.rag_windows.tools import call_blocks, call_message, result_message
from rag_windows import Citation, Passage
from rag_windows.errors import InputError
from rag_windows.integration import ToolAnswer, carried

ROLES = {
    MessageRole.SYSTEM: "system",
    MessageRole.DEVELOPER: "system",
    MessageRole.USER: "user",
    MessageRole.ASSISTANT: "assistant",
    MessageRole.CHATBOT: "assistant",
    MessageRole.MODEL: "assistant",
    MessageRole.TOOL: "tool",
    MessageRole.FUNCTION: "tool",
}
"""LlamaIndex's roles -> those of a chat template."""

_UNSHOWN = (CitationBlock, ThinkingBlock, CachePoint, ToolCallBlock)
"""What an earlier answer carries beside its text; calls of tools are read apart from it, and the
rest is not shown to the model again."""


def read_messages(
    messages: Iterable[ChatMessage],
) -> tuple[list[dict[str, Any]], list[Passage]]:
    """What the engine takes, from what LlamaIndex gives.

    Args:
        messages: leading system messages are joined to one; each citable block, in whatever
            message, becomes a passage.

    Returns:
        Messages as `Conversation.of` takes them, and the passages in order.

    Raises:
        InputError: a role or a block that a text model can't be shown.
    """
    read: list[dict[str, Any]] = []
    passages: list[Passage] = []
    for index, message in enumerate(messages):
        if message.role not in ROLES:
            raise InputError(
                f"Message {index} has the role {message.role.value!r}, which this model does not "
                "know; give the text as the user's message."
            )
        role = ROLES[message.role]
        before = len(passages)
        content = "\n".join(_texts(message, index, passages))
        if role == "system" and len(read) == 1 and read[0]["role"] == "system":
            both = (read[0]["content"], content)
            read[0]["content"] = "\n\n".join(text for text in both if text)
        elif role == "assistant":
            read.append(call_message(message, content))
        elif role == "tool":
            brought = len(passages) - before
            if brought and not content:
                content = f"{brought} passages; they stand at the beginning of this conversation."
            read.append(result_message(message, content))
        else:
            read.append({"role": role, "content": content})
    return read, passages


def _texts(message: ChatMessage, index: int, passages: list[Passage]) -> Iterable[str]:
    for block in message.blocks:
        if isinstance(block, TextBlock):
            yield block.text
        elif isinstance(block, CitableBlock):
            passages.append(passage_of_block(block))
        elif not isinstance(block, _UNSHOWN):
            raise InputError(
                f"Message {index} holds a {type(block).__name__}; this model reads text and "
                "citable blocks only. Give its text as a TextBlock, or as a CitableBlock to read "
                "it as a passage."
            )


def answer_blocks(
    answer: ToolAnswer, citations: Sequence[Citation] | None, passages: Sequence[Passage]
) -> list[ContentBlock]:
    """What an answer holds, in order.

    Its reasoning, where it was told apart; its text; a citation for each passage that carried it,
    the strongest first; calls of tools. Which passages did is `rag_windows.citing.carried`'s rule.
    A citation block holds the passage's text, its id as ``source``, its title, and its place among
    the passages as given as ``additional_location_info["passage"]``.
    """
    blocks: list[ContentBlock] = []
    if answer.reasoning:
        blocks.append(ThinkingBlock(content=answer.reasoning))
    if answer.text or not answer.calls:
        blocks.append(TextBlock(text=answer.text))
    for citation in carried(citations):
        passage = passages[citation.passage]
        blocks.append(
            CitationBlock(
                cited_content=TextBlock(text=passage.text),
                source=passage.id or "",
                title=passage.title or "",
                additional_location_info={"passage": citation.passage},
            )
        )
    return [*blocks, *call_blocks(answer.calls)]
