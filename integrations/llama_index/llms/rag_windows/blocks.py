"""LlamaIndex's chat messages, read and written."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from llama_index.core.base.llms.types import (
    CachePoint,
    ChatMessage,
    CitableBlock,
    CitationBlock,
    ContentBlock,
    MessageRole,
    TextBlock,
    ThinkingBlock,
)

from llama_index.llms.rag_windows.passages import passage_of_block
from rag_windows import Citation, Passage
from rag_windows.citing import carried
from rag_windows.errors import InputError

ROLES = {
    MessageRole.SYSTEM: "system",
    MessageRole.DEVELOPER: "system",
    MessageRole.USER: "user",
    MessageRole.ASSISTANT: "assistant",
    MessageRole.CHATBOT: "assistant",
    MessageRole.MODEL: "assistant",
}
"""LlamaIndex's roles -> those of a chat template."""

_UNSHOWN = (CitationBlock, ThinkingBlock, CachePoint)
"""What an earlier answer carries beside its text; the model is not shown it again."""


def read_messages(
    messages: Iterable[ChatMessage],
) -> tuple[list[dict[str, str]], list[Passage]]:
    """What the engine takes, from what LlamaIndex gives.

    Args:
        messages: leading system messages are joined to one; each citable block, in whatever
            message, becomes a passage.

    Returns:
        Messages with ``role`` and ``content``, and the passages in order.

    Raises:
        InputError: a role or a block that a text model can't be shown.
    """
    read: list[dict[str, str]] = []
    passages: list[Passage] = []
    for index, message in enumerate(messages):
        if message.role not in ROLES:
            raise InputError(
                f"Message {index} has the role {message.role.value!r}, which this model does not "
                "know; it calls no tools by itself. Use ReActAgent, which writes calls and results "
                "as text, or give the text as the user's message."
            )
        role = ROLES[message.role]
        content = "\n".join(_texts(message, index, passages))
        if role == "system" and len(read) == 1 and read[0]["role"] == "system":
            both = (read[0]["content"], content)
            read[0]["content"] = "\n\n".join(text for text in both if text)
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
    text: str, citations: Sequence[Citation] | None, passages: Sequence[Passage]
) -> list[ContentBlock]:
    """The answer's text, then a citation for each passage that carried it, the strongest first.

    Which ones did is `rag_windows.citing.carried`'s rule. A citation block holds the passage's
    text, its id as ``source``, its title, and its place among the passages as given as
    ``additional_location_info["passage"]``.
    """
    blocks: list[ContentBlock] = [TextBlock(text=text)]
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
    return blocks
