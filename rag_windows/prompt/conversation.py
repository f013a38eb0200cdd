"""What a caller gives: messages, calls of tools, definitions of tools; and what may stand where."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rag_windows.errors import PromptError

_EXTRA = {"assistant": {"tool_calls"}, "tool": {"tool_call_id", "name"}}
_IDENTIFIER = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
_DEEPEST = 32


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call.

    Attributes:
        name: of the tool.
        arguments: a JSON object.
        id: the caller's name for the call, or None.
    """

    name: str
    arguments: Mapping[str, Any]
    id: str | None = None

    @classmethod
    def of(cls, value: object, where: str) -> ToolCall:
        """Read ``{"id": ..., "type": "function", "function": {"name": ..., "arguments": ...}}``.

        ``arguments`` is an object or its JSON.
        """
        function = value.get("function") if isinstance(value, Mapping) else None
        if not isinstance(value, Mapping) or not isinstance(function, Mapping):
            raise PromptError(
                f"A tool call of {where} must look like "
                '{"id": ..., "function": {"name": ..., "arguments": {...}}}.'
            )
        arguments = function.get("arguments") or {}
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except (ValueError, RecursionError) as error:
                raise PromptError(
                    f"The arguments of a tool call of {where} are no JSON: {error}."
                ) from error
        if not isinstance(arguments, Mapping):
            raise PromptError(f"The arguments of a tool call of {where} must be a JSON object.")
        return cls(
            _identifier(function.get("name"), f"The name of a tool call of {where}"),
            _plain(arguments, f"the arguments of a tool call of {where}"),
            _identifier(value.get("id"), f"The id of a tool call of {where}", optional=True),
        )


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

    @classmethod
    def of(cls, entry: object, index: int) -> Message:
        """Read one message; see `Conversation.of`."""
        where = f"message {index}"
        if not isinstance(entry, Mapping) or "role" not in entry or "content" not in entry:
            raise PromptError(f"{where.capitalize()} must be a mapping with 'role' and 'content'.")
        role, content = entry["role"], entry["content"]
        if role not in ("system", "user", "assistant", "tool"):
            raise PromptError(
                f"{where.capitalize()} has the role {role!r}; use 'system', 'user', 'assistant' or "
                "'tool'."
            )
        if not isinstance(content, str):
            raise PromptError(
                f"The content of {where} must be a string, not {type(content).__name__}; join the "
                "text of its parts."
            )
        read = {"role", "content"} | _EXTRA.get(role, set())
        if unknown := sorted(str(key) for key in entry.keys() - read):
            raise PromptError(
                f"{where.capitalize()} has the keys {unknown}; only {sorted(read)} are read of "
                f"role {role}."
            )
        return cls(
            role,
            content,
            tuple(ToolCall.of(call, where) for call in entry.get("tool_calls") or ()),
            _identifier(entry.get("tool_call_id"), f"'tool_call_id' of {where}", optional=True),
            _identifier(entry.get("name"), f"'name' of {where}", optional=True),
        )


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
        messages = [Message.of(entry, i) for i, entry in enumerate(query)]
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
        return cls("\n\n".join(instructions), _paired(messages), checked, opening)


def _paired(messages: Sequence[Message]) -> tuple[Message, ...]:
    """With the tools' names at their answers, which some templates insist on.

    Raises:
        PromptError: an answer without a call, or calls without an answer.
    """
    names: dict[str | None, str] = {}
    paired = []
    caller: Message | None = None
    for message in messages:
        if message.role == "tool":
            if caller is None or not caller.calls:
                raise PromptError(
                    "A message with the role 'tool' must follow the assistant's message whose "
                    "tool_calls it answers; keep that one, or give the tool's text as the user's."
                )
            message = replace(message, name=message.name or names.get(message.call_id))
        elif message.role != "system":
            caller = message
            names.update((call.id, call.name) for call in message.calls if call.id)
        paired.append(message)
    if messages and messages[-1].calls:
        raise PromptError(
            "The last message calls tools, and nothing answers it. Append a message with the role "
            "'tool' for each call, or leave the calls out."
        )
    return tuple(paired)


def check_tools(tools: Sequence[Mapping[str, Any]]) -> tuple[Mapping[str, Any], ...]:
    """A copy of definitions ``{"type": "function", "function": {"name", "parameters", ...}}``.

    Raises:
        PromptError: one has another shape, or two have one name.
    """
    checked: dict[str, Mapping[str, Any]] = {}
    for index, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping):
            raise PromptError(
                f"Tool {index} must look like "
                '{"type": "function", "function": {"name": ..., "parameters": {...}}}.'
            )
        name = str(_identifier(function.get("name"), f"The name of tool {index}"))
        if name in checked:
            raise PromptError(f"Two tools have the name {name!r}; rename one.")
        checked[name] = _plain(tool, f"tool {name}")
    return tuple(checked.values())


def tool_names(tools: Sequence[Mapping[str, Any]]) -> list[str]:
    """Names of checked tools, in order."""
    return [str(tool["function"]["name"]) for tool in tools]


def strings(value: Any) -> Iterator[str]:
    """Every string in JSON data, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, entry in value.items():
            yield key
            yield from strings(entry)
    elif isinstance(value, list):
        for entry in value:
            yield from strings(entry)


def _identifier(value: Any, what: str, *, optional: bool = False) -> Any:
    if (optional and value is None) or (isinstance(value, str) and _IDENTIFIER.fullmatch(value)):
        return value
    raise PromptError(
        f"{what} must be 1 to 128 of the characters A-Z a-z 0-9 _ . : -, not {value!r}."
    )


def _plain(value: Any, where: str, depth: int = 0) -> Any:
    """A deep copy made of dict, list, str, int, float, bool and None."""
    if depth > _DEEPEST:
        raise PromptError(f"There are more than {_DEEPEST} levels in {where}; flatten them.")
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: _plain(entry, where, depth + 1) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry, where, depth + 1) for entry in value]
    raise PromptError(f"There is a {type(value).__name__} in {where}; only JSON values can be.")


@dataclass(slots=True)
class Dialogue:
    """Turns of user and assistant that grow, oldest first."""

    messages: list[Mapping[str, str]] = field(default_factory=list)

    def with_question(self, question: str) -> list[Mapping[str, str]]:
        """The messages so far and a new question."""
        return [*self.messages, {"role": "user", "content": question}]

    def add(self, question: str, answer: str) -> None:
        """Keep a turn."""
        self.messages = [*self.with_question(question), {"role": "assistant", "content": answer}]

    def search_text(self, question: str) -> str:
        """What to retrieve with: a follow-up such as "When was she born?" names nothing itself.

        The question counts four times, the turn before it twice, and the two turns before that
        once: several follow-ups in a row still find the entity that the first of them named.
        """
        before = [message["content"] for message in self.messages[-6:]]
        return "\n".join([*[question] * 4, *before, *before[-2:]])
