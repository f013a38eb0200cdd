"""A question, or a conversation that ends in one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rag_windows.errors import PromptError


@dataclass(frozen=True, slots=True)
class Message:
    """One turn: ``role`` is ``user`` or ``assistant``, ``content`` its text."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Conversation:
    """What was said so far.

    Attributes:
        system: the instruction, or an empty string.
        turns: user and assistant messages in order; the last one is the user's.
    """

    system: str
    turns: tuple[Message, ...]

    @classmethod
    def of(
        cls, query: str | Sequence[Mapping[str, Any]], prefix: str | None = None
    ) -> Conversation:
        """Read what a caller gives.

        Args:
            query: a question, or messages ``{"role": ..., "content": ...}``. A leading system
                message is the instruction.
            prefix: the instruction; put before a leading system message, with a blank line between.

        Raises:
            PromptError: no messages, a wrong role or content, a system message that is not the
                first, or a last message that is not the user's.
        """
        if prefix is not None and not isinstance(prefix, str):
            raise PromptError(f"prefix must be a string or None, not {type(prefix).__name__}.")
        if isinstance(query, str):
            return cls(prefix or "", (Message("user", query),))
        if not isinstance(query, Sequence) or not query:
            raise PromptError(
                "query must be a question (a string) or a non-empty list of messages like "
                '{"role": "user", "content": "..."}.'
            )
        messages = [_message(entry, i) for i, entry in enumerate(query)]
        instructions = [prefix] if prefix else []
        if messages[0].role == "system":
            instructions += [messages[0].content] if messages[0].content else []
            messages = messages[1:]
        if any(message.role == "system" for message in messages):
            raise PromptError(
                "Only the first message may have the role 'system'; move its text there, or give "
                "it as prefix=."
            )
        if not messages or messages[-1].role != "user":
            raise PromptError(
                "The last message must be the user's: it is the question to answer. Append "
                '{"role": "user", "content": ...}.'
            )
        return cls("\n\n".join(instructions), tuple(messages))


def _message(entry: object, index: int) -> Message:
    if not isinstance(entry, Mapping) or "role" not in entry or "content" not in entry:
        raise PromptError(
            f"Message {index} must be a mapping with 'role' and 'content', like "
            '{"role": "user", "content": "..."}.'
        )
    role, content = entry["role"], entry["content"]
    if role not in ("system", "user", "assistant"):
        raise PromptError(
            f"Message {index} has the role {role!r}; use 'system' (first message only), 'user' or "
            "'assistant'."
        )
    if not isinstance(content, str):
        raise PromptError(
            f"The content of message {index} must be a string, not {type(content).__name__}; join "
            "the text of its parts."
        )
    unknown = sorted(str(key) for key in entry.keys() - {"role", "content"})
    if unknown:
        raise PromptError(
            f"Message {index} has the keys {unknown}; only role and content are read."
        )
    return Message(role, content)
