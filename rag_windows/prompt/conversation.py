"""Conversations: roles, turns, and what may stand where."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rag_windows.errors import PromptError
from rag_windows.prompt.tool_calls import ToolCall, check_tools, identifier

_EXTRA = {"assistant": {"tool_calls"}, "tool": {"tool_call_id", "name"}}


@dataclass(frozen=True, slots=True)
class Message:
    """One turn.

    Attributes:
        role: ``user``, ``assistant``, ``tool`` (what a tool gave back), or ``system`` (behind the
            first message).
        content: its text.
        calls: the assistant's calls of tools.
        call_id: the id of the call that a tool answers.
        name: the tool's name.
    """

    role: str
    content: str
    calls: tuple[ToolCall, ...] = ()
    call_id: str | None = None
    name: str | None = None


@dataclass(frozen=True, slots=True)
class Conversation:
    """What was said so far.

    Attributes:
        system: the instruction, or an empty string.
        turns: messages in order.
        tools: definitions of the tools that the model may call.
        opening: how the answer begins, written for the model; trusted like the template itself.
        plain: whether a model without a chat template reads the last turn as it stands, with
            nothing around it, so that what it goes on with is text like that.
    """

    system: str
    turns: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    opening: str = ""
    plain: bool = False

    @property
    def continued(self) -> bool:
        """Whether the answer goes on with what the assistant said last."""
        return bool(self.turns) and self.turns[-1].role == "assistant"

    @property
    def asked(self) -> bool:
        """Whether the user says anything in it."""
        return any(turn.role == "user" for turn in self.turns)

    @classmethod
    def of(
        cls,
        query: str | Sequence[Mapping[str, Any]] | Conversation,
        prefix: str | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        opening: str = "",
    ) -> Conversation:
        """Read what a caller gives.

        Args:
            query: a question, messages ``{"role": ..., "content": ...}``, or a conversation. A
                leading system message is the instruction; later ones stand where they are. An
                assistant's message may have ``tool_calls``, and ``tool`` messages that follow have
                ``tool_call_id`` and may have ``name``, as in OpenAI's chat API. Where the
                assistant's message is the last one, the answer goes on with it.
            prefix: the instruction; put before a leading system message, with a blank line between.
            tools: what the model may call, see `check_tools`.
            opening: how the answer begins. Never put a user's or a passage's text here.

        Raises:
            PromptError: no messages, a wrong role or content, a tool's message that answers no
                call, or calls in the last message, whose answers are missing.
        """
        if prefix is not None and not isinstance(prefix, str):
            raise PromptError(f"prefix must be a string or None, not {type(prefix).__name__}.")
        if isinstance(query, Conversation):
            both = "\n\n".join(part for part in (prefix, query.system) if part)
            return replace(query, system=both)
        checked = check_tools(tools)
        if isinstance(query, str):
            return cls(prefix or "", (Message("user", query),), checked, opening)
        if not isinstance(query, Sequence) or not query:
            raise PromptError(
                "query must be a question (a string) or a non-empty list of messages like "
                '{"role": "user", "content": "..."}.'
            )
        messages = [_message(entry, i) for i, entry in enumerate(query)]
        instructions = [prefix] if prefix else []
        while messages and messages[0].role == "system":
            instruction = messages.pop(0).content
            if instruction:
                instructions.append(instruction)
                break
        if not messages and not instructions:
            raise PromptError(
                "The messages hold no text; append the question as "
                '{"role": "user", "content": "..."}.'
            )
        _check_calls(messages)
        return cls("\n\n".join(instructions), _named(messages), checked, opening)


def _check_calls(messages: Sequence[Message]) -> None:
    caller: Message | None = None
    for message in messages:
        if message.role == "tool" and (caller is None or not caller.calls):
            raise PromptError(
                "A message with the role 'tool' must follow the assistant's message whose "
                "tool_calls it answers; keep that one, or give the tool's text as the user's."
            )
        if message.role in ("user", "assistant"):
            caller = message
    if messages and messages[-1].calls:
        raise PromptError(
            "The last message calls tools, and nothing answers it. Append a message with the role "
            "'tool' for each call, or leave the calls out."
        )


def _named(messages: Sequence[Message]) -> tuple[Message, ...]:
    """With the tools' names at their answers, which some templates insist on."""
    names = {call.id: call.name for message in messages for call in message.calls if call.id}
    return tuple(
        replace(message, name=names.get(message.call_id))
        if message.role == "tool" and message.name is None and message.call_id
        else message
        for message in messages
    )


def _message(entry: object, index: int) -> Message:
    if not isinstance(entry, Mapping) or "role" not in entry or "content" not in entry:
        raise PromptError(
            f"Message {index} must be a mapping with 'role' and 'content', like "
            '{"role": "user", "content": "..."}.'
        )
    role, content = entry["role"], entry["content"]
    if role not in ("system", "user", "assistant", "tool"):
        raise PromptError(
            f"Message {index} has the role {role!r}; use 'system', 'user', 'assistant' or 'tool'."
        )
    if not isinstance(content, str):
        raise PromptError(
            f"The content of message {index} must be a string, not {type(content).__name__}; join "
            "the text of its parts."
        )
    read = {"role", "content"} | _EXTRA.get(role, set())
    unknown = sorted(str(key) for key in entry.keys() - read)
    if unknown:
        raise PromptError(
            f"Message {index} has the keys {unknown}; only {sorted(read)} are read of role {role}."
        )
    calls = tuple(ToolCall.of(call, f"message {index}") for call in entry.get("tool_calls") or ())
    names = [
        None if entry.get(key) is None else identifier(entry[key], f"{key!r} of message {index}")
        for key in ("tool_call_id", "name")
    ]
    return Message(role, content, calls, *names)


@dataclass(slots=True)
class Dialogue:
    """What was said so far.

    Attributes:
        messages: of roles "user" and "assistant", oldest first.
    """

    messages: list[Mapping[str, str]] = field(default_factory=list)

    def with_question(self, question: str) -> list[Mapping[str, str]]:
        """The messages so far and a new question."""
        return [*self.messages, {"role": "user", "content": question}]

    def add(self, question: str, answer: str) -> None:
        """Keep a turn."""
        self.messages = [
            *self.with_question(question),
            {"role": "assistant", "content": answer},
        ]

    def search_text(self, question: str) -> str:
        """What to retrieve with: a follow-up such as "When was she born?" names nothing itself.

        The question counts four times, the turn before it twice, and the two turns before that
        once: several follow-ups in a row still find the entity that the first of them named.
        """
        before = [message["content"] for message in self.messages[-6:]]
        return "\n".join([*[question] * 4, *before, *before[-2:]])
