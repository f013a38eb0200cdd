r"""The prompt of a model without a chat template.

``{bos}`` stands for the special tokens that the tokenizer itself puts before a text; ``{system}``
and its blank line are there only with an instruction; earlier turns stand before the last
question::

    {bos}{system}\n\n | passages | Question: {q}\nAnswer: {a}\n\nQuestion: {question}\nAnswer:

A conversation that ends with the assistant ends behind ``Answer: {a}``; a later instruction
stands in its place, with its blank line. One that is ``plain`` ends with its last turn as it
stands::

    {bos}{system}\n\n | passages | {turn}
"""

from __future__ import annotations

from typing import Any

from rag_windows.boundary import Piece
from rag_windows.conversation import Conversation, Message
from rag_windows.errors import PromptError


class BaseLayout:
    """Questions and answers as plain text.

    Attributes:
        leading: ids that the tokenizer puts before a text by itself.
        begins_in_text: False: without an instruction the first window begins the text.

    Args:
        tokenizer: a transformers tokenizer.
    """

    begins_in_text = False

    def __init__(self, tokenizer: Any) -> None:
        self.leading = _leading(tokenizer)

    def cut(self, conversation: Conversation, *, slot: bool) -> tuple[list[Piece], list[Piece]]:
        """What stands before the passages, and after them; all of it after, without passages.

        Raises:
            PromptError: there are tools, or calls of them.
        """
        if conversation.tools or any(t.calls or t.role == "tool" for t in conversation.turns):
            raise PromptError(
                "This model has no chat template, so it can't be shown tools or their answers. Use "
                "a model with one, or set tokenizer.chat_template."
            )
        system = [Piece(f"{conversation.system}\n\n")] if conversation.system else []
        turns = [Piece(_written(turn)) for turn in conversation.turns]
        if conversation.plain:
            turns[-1:] = [Piece(conversation.turns[-1].content)]
        elif conversation.continued:
            begun = conversation.turns[-1].content
            turns[-1:] = [Piece(f"Answer: {begun}" if begun else "Answer:")]
        else:
            turns.append(Piece("Answer:"))
        if conversation.opening:
            turns.append(Piece(conversation.opening, trusted=True))
        return (system, turns) if slot else ([], system + turns)


def _written(turn: Message) -> str:
    if turn.role == "system":
        return f"{turn.content}\n\n"
    return f"Question: {turn.content}\n" if turn.role == "user" else f"Answer: {turn.content}\n\n"


def _leading(tokenizer: Any) -> tuple[int, ...]:
    bare = list(tokenizer.encode("a", add_special_tokens=False))
    full = list(tokenizer.encode("a"))
    for start in range(len(full) - len(bare) + 1):
        if full[start : start + len(bare)] == bare:
            return tuple(full[:start])
    return ()
