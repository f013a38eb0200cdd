"""What a caller gives: messages, calls of tools, definitions of tools; and what may stand where."""

from __future__ import annotations

import reprlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import (
    AliasPath,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    StringConstraints,
    TypeAdapter,
    ValidationError,
)
from pydantic_core import from_json

from rag_windows.errors import PromptError

Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.:-]{1,128}$")]
"""Of a tool or a call: it stands in templates as it is."""


def _from_text(arguments: object) -> object:
    """Arguments of a call, also as JSON; none are an empty object."""
    return (from_json(arguments) if isinstance(arguments, str) and arguments else arguments) or {}


class _Named(BaseModel):
    """A definition or a call of a tool, as far as its name goes."""

    model_config = ConfigDict(frozen=True)

    name: Name = Field(validation_alias=AliasPath("function", "name"))


class ToolCall(_Named):
    """One call, ``{"id": ..., "type": "function", "function": {"name": ..., "arguments": ...}}``.

    ``arguments`` are an object, or its JSON; ``id`` is the caller's name for the call, or None.
    """

    arguments: Annotated[dict[str, JsonValue], BeforeValidator(_from_text)] = Field(
        default={}, validation_alias=AliasPath("function", "arguments")
    )
    id: Name | None = None


class Message(BaseModel):
    """One turn; ``call_id`` and ``name`` are of the call that a tool answers."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    role: Literal["system", "user", "assistant", "tool"]
    content: Annotated[str, Field(strict=True)]
    calls: tuple[ToolCall, ...] = Field(default=(), validation_alias="tool_calls")
    call_id: Name | None = Field(default=None, validation_alias="tool_call_id")
    name: Name | None = None

    @classmethod
    def of(cls, entry: object, index: int) -> Message:
        """Read one message; see `Conversation.of`."""
        if isinstance(entry, Mapping):
            entry = {key: value for key, value in entry.items() if value is not None}
        try:
            return cls.model_validate(entry)
        except ValidationError as error:
            raise malformed(f"Message {index}", error) from error


def malformed(what: str, error: ValidationError) -> PromptError:
    """One line for a value of the wrong shape."""
    first = error.errors()[0]
    place = ".".join(map(str, first["loc"]))[:80]
    return PromptError(
        f"{what}{', ' if place else ''}{place}: {first['msg']}; it is "
        f"{reprlib.repr(first['input'])}."
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
            asked = Message.of({"role": "user", "content": query}, 0)
            return cls(prefix or "", (asked,), checked, opening)
        if not isinstance(query, Sequence) or not query:
            raise PromptError(
                "query must be a question (a string) or a non-empty list of messages like "
                '{"role": "user", "content": "..."}.'
            )
        messages = [Message.of(entry, i) for i, entry in enumerate(query)]
        leading = messages.pop(0).content if messages[0].role == "system" else None
        system = "\n\n".join(part for part in (prefix, leading) if part)
        if not messages and not system:
            raise PromptError(
                "The messages hold no text; append the question as "
                '{"role": "user", "content": "..."}.'
            )
        return cls(system, _paired(messages), checked, opening)


def _paired(messages: Sequence[Message]) -> tuple[Message, ...]:
    """With the tools' names at their answers, which some templates insist on."""
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
            name = message.name or names.get(message.call_id)
            message = message.model_copy(update={"name": name})
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


_DEFINITION = TypeAdapter(dict[str, JsonValue])


def check_tools(tools: Sequence[Mapping[str, Any]]) -> tuple[Mapping[str, Any], ...]:
    """A copy of definitions ``{"type": "function", "function": {"name", "parameters", ...}}``."""
    checked: dict[str, Mapping[str, Any]] = {}
    for index, tool in enumerate(tools):
        try:
            name = _Named.model_validate(tool).name
            plain = _DEFINITION.validate_python(tool)
        except ValidationError as error:
            raise malformed(f"Tool {index}", error) from error
        if name in checked:
            raise PromptError(f"Two tools have the name {name!r}; rename one.")
        checked[name] = plain
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


def search_text(messages: Sequence[Mapping[str, Any]], question: str) -> str:
    """What to retrieve with: a follow-up such as "When was she born?" names nothing itself.

    The question counts four times, the turn before it twice, and the two turns before that
    once: several follow-ups in a row still find the entity that the first of them named.
    """
    before = [str(message["content"]) for message in messages[-6:]]
    return "\n".join([*[question] * 4, *before, *before[-2:]])
