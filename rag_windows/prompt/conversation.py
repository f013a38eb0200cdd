"""What a caller gives: messages, calls of tools, definitions of tools; and what may stand where."""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rag_windows.errors import PromptError

_ALSO: Mapping[str, set[str]] = {
    "system": set(),
    "user": set(),
    "assistant": {"tool_calls"},
    "tool": {"tool_call_id", "name"},
}
"""What is read of a message beside role and content, by its role."""

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
        shape = f"A tool call of {where}", '{"function": {"name": ..., "arguments": {...}}}'
        function = value.get("function") if isinstance(value, Mapping) else None
        if not isinstance(value, Mapping) or not isinstance(function, Mapping):
            raise _malformed(*shape, value)
        name, identity = function.get("name"), value.get("id")
        arguments = function.get("arguments") or {}
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except (ValueError, RecursionError) as error:
                raise PromptError(
                    f"The arguments of a tool call of {where} are no JSON: {error}."
                ) from error
        if not isinstance(arguments, Mapping) or name is None or not _named(name, identity):
            raise _malformed(*shape, value)
        plain = _plain(arguments, f"the arguments of a tool call of {where}")
        return cls(name, plain, identity)


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
        given = entry if isinstance(entry, Mapping) else {}
        role, content = given.get("role"), given.get("content")
        call_id, name = given.get("tool_call_id"), given.get("name")
        if (
            not isinstance(role, str)
            or not isinstance(content, str)
            or role not in _ALSO
            or not given.keys() <= {"role", "content", *_ALSO[role]}
            or not _named(call_id, name)
        ):
            raise _malformed(
                f"Message {index}",
                '{"role": "user", "content": "text"}, the role being system, user, assistant (also '
                "with tool_calls) or tool (also with tool_call_id and name) and no keys but these",
                entry,
            )
        calls = (ToolCall.of(call, f"message {index}") for call in given.get("tool_calls") or ())
        return cls(role, content, tuple(calls), call_id, name)


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
        name = function.get("name") if isinstance(function, Mapping) else None
        if name is None or not _named(name):
            shape = '{"type": "function", "function": {"name": ..., "parameters": {...}}}'
            raise _malformed(f"Tool {index}", shape, tool)
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


def _named(*names: Any) -> bool:
    """Whether names and ids can stand in a template; None stands for none."""
    return all(
        name is None or (isinstance(name, str) and _IDENTIFIER.fullmatch(name)) for name in names
    )


def _malformed(what: str, shape: str, value: object) -> PromptError:
    return PromptError(
        f"{what} must look like {shape}, names and ids being 1 to 128 of A-Z a-z 0-9 _ . : -, not "
        f"{reprlib.repr(value)}."
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
