"""Conversations: what a caller gives, and how a chat template, or plain text, writes them."""

from __future__ import annotations

import inspect
import json
import re
import reprlib
import secrets
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from jinja2.exceptions import TemplateError
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
from rag_windows.prompt.tokenizing import Piece

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
        f"{what}{', ' if place else ''}{place}: {first['msg']} (given: "
        f"{reprlib.repr(first['input'])})."
    )


@dataclass(frozen=True, slots=True)
class Conversation:
    """What was said so far, and the tools that the model may call.

    Attributes:
        system: the instruction, or an empty string.
        opening: how the answer begins, written for the model; trusted like the template itself.
        plain: whether a model without a chat template reads the last turn with nothing around it.
        template_kwargs: further variables of the chat template, over the model's own.
    """

    system: str
    turns: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    opening: str = ""
    plain: bool = False
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def continued(self) -> bool:
        """Whether the answer goes on with what the assistant said last."""
        return bool(self.turns) and self.turns[-1].role == "assistant"

    @classmethod
    def of(
        cls,
        query: str | Sequence[Mapping[str, Any]] | Conversation,
        prefix: str | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        opening: str = "",
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> Conversation:
        """Read what a caller gives: a question, messages of OpenAI's chat API, or a conversation.

        A leading system message is the instruction, behind the `prefix` and a blank line; later
        ones stand where they are. Where the assistant's message is the last one, the answer goes
        on with it. Never put a user's or a passage's text into `opening` or `template_kwargs`.
        """
        if prefix is not None and not isinstance(prefix, str):
            raise PromptError(f"prefix must be a string or None, not {type(prefix).__name__}.")
        if isinstance(query, Conversation):
            both = "\n\n".join(part for part in (prefix, query.system) if part)
            return replace(query, system=both)
        checked, variables = check_tools(tools), dict(template_kwargs or {})
        if isinstance(query, str):
            asked = Message.of({"role": "user", "content": query}, 0)
            return cls(prefix or "", (asked,), checked, opening, template_kwargs=variables)
        if not isinstance(query, Sequence) or not query:
            raise PromptError(
                "query must be a question (a string) or a non-empty list of messages such as "
                '{"role": "user", "content": "..."}.'
            )
        messages = [Message.of(entry, i) for i, entry in enumerate(query)]
        leading = messages.pop(0).content if messages[0].role == "system" else None
        system = "\n\n".join(part for part in (prefix, leading) if part)
        if not messages and not system:
            raise PromptError(
                "The messages hold no text. Append the question as "
                '{"role": "user", "content": "..."}.'
            )
        return cls(system, _paired(messages), checked, opening, template_kwargs=variables)


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
                    "tool_calls it answers. Keep that message, or give the tool's text as a "
                    "user's message."
                )
            name = message.name or names.get(message.call_id)
            message = message.model_copy(update={"name": name})
        elif message.role != "system":
            caller = message
            names.update((call.id, call.name) for call in message.calls if call.id)
        paired.append(message)
    if messages and messages[-1].calls:
        raise PromptError(
            "The last message calls tools, and no message answers them. Append a message with "
            "the role 'tool' for each call, or leave the calls out."
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
            raise PromptError(f"Two tools have the name {name!r}. Rename one.")
        checked[name] = plain
    return tuple(checked.values())


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


@dataclass(frozen=True, slots=True)
class _Said:
    """An untrusted text of a message, by its index and role; a template may leave out some."""

    text: str
    message: int
    role: str
    optional: bool = False


class _Filling:
    """The messages of one conversation with a placeholder for each untrusted text."""

    def __init__(
        self, conversation: Conversation, *, system: str | None, folded: str, slot: bool
    ) -> None:
        turns = list(conversation.turns)
        if system is not None:
            turns.insert(0, Message(role="system", content=system))
        self.roles = [turn.role for turn in turns]
        self.said: dict[str, _Said] = {}
        # Characters in which the placeholders of one conversation differ from all others'.
        self._nonce = "".join(chr(0xE000 + secrets.randbelow(256)) for _ in range(16))
        self.marks = re.compile(rf"({self._nonce}\d{{6}})")
        self.slot = self._mark(0) if slot else None
        first_user = self.roles.index("user") if "user" in self.roles else None
        messages = []
        for number, turn in enumerate(turns):
            before = ""
            if number == first_user:
                before = self._put(_Said(folded, number, turn.role)) + (self.slot or "")
            own = self._put(_Said(turn.content, number, turn.role, optional=bool(turn.calls)))
            calls = [self._call(call, number) for call in turn.calls] or None
            identity = {"tool_call_id": turn.call_id, "name": turn.name, "tool_calls": calls}
            known = {key: value for key, value in identity.items() if value is not None}
            messages.append({"role": turn.role, "content": before + own, **known})
        self._messages = json.dumps(messages, ensure_ascii=False)

    def messages(self, real: Collection[str] = ()) -> list[dict[str, Any]]:
        """A copy of the messages, with the true texts in place of some placeholders."""

        def text(match: re.Match[str]) -> str:
            return json.dumps(self.said[match[0]].text)[1:-1] if match[0] in real else match[0]

        filled: list[dict[str, Any]] = json.loads(self.marks.sub(text, self._messages))
        return filled

    def _mark(self, index: int) -> str:
        """A placeholder: private-use characters and digits survive trimming."""
        return f"{self._nonce}{index:06}"

    def _put(self, said: _Said) -> str:
        """The placeholder of a text, or nothing for none."""
        if not said.text:
            return ""
        mark = self._mark(len(self.said) + 1)
        self.said[mark] = said
        return mark

    def _call(self, call: ToolCall, message: int) -> dict[str, Any]:
        def put(value: Any) -> Any:
            if isinstance(value, str):
                return self._put(_Said(value, message, "assistant"))
            if isinstance(value, dict):
                return {put(key): put(entry) for key, entry in value.items()}
            return [put(entry) for entry in value] if isinstance(value, list) else value

        identity = {} if call.id is None else {"id": call.id}
        function = {"name": put(call.name), "arguments": put(call.arguments)}
        return {**identity, "type": "function", "function": function}


def knows_variable(tokenizer: Any, template_kwargs: Mapping[str, Any], name: str) -> bool:
    """Whether a tokenizer's chat template mentions a variable; what it does not is ignored."""
    if not getattr(tokenizer, "chat_template", None):
        return False
    template = tokenizer.get_chat_template(template_kwargs.get("chat_template"))
    return re.search(rf"\b{re.escape(name)}\b", template) is not None


def behind_own_system(tokenizer: Any, template_kwargs: Mapping[str, Any], text: str) -> str:
    """An instruction behind the system message that a chat template has of its own, if it has one.

    A model was trained with that message, which an instruction would else replace.
    """
    if not getattr(tokenizer, "chat_template", None):
        return text
    own = ChatTemplate(tokenizer, template_kwargs).own_system().strip()
    if own and own[-1].isalnum():
        own += "."
    return f"{own} {text}" if own else text


class BaseLayout:
    """Questions and answers as plain text, behind the ids that a tokenizer puts before a text."""

    def __init__(self, tokenizer: Any) -> None:
        bare = tokenizer.encode("a", add_special_tokens=False)
        full = tokenizer.encode("a")
        starts = range(len(full) - len(bare) + 1)
        found = next((i for i in starts if full[i : i + len(bare)] == bare), 0)
        self.leading: tuple[int, ...] = tuple(full[:found])

    def cut(self, conversation: Conversation, *, slot: bool) -> tuple[list[Piece], list[Piece]]:
        """What stands before the passages, and after them; all of it after, without passages."""
        if conversation.tools or any(t.calls or t.role == "tool" for t in conversation.turns):
            raise PromptError(
                "This model has no chat template, so it can't read tools or their answers. Use a "
                "model with a chat template, or set tokenizer.chat_template."
            )
        forms = {"system": "{}\n\n", "user": "Question: {}\n", "assistant": "Answer: {}\n\n"}
        system = [Piece(f"{conversation.system}\n\n")] if conversation.system else []
        turns = [Piece(forms[turn.role].format(turn.content)) for turn in conversation.turns]
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


_CLOCK = "strftime_now"  # what templates get the time from


class ChatTemplate:
    """The chat template of a tokenizer, with further variables such as ``enable_thinking``.

    The template sees a placeholder in place of each message, of each string in a tool call and of
    the passages, so no text can steer it, and what it writes itself is known. A second rendering
    with the true texts tells what it makes of them: trimmed, upper- or lower-cased, written as a
    JSON string (tool calls and their results), or an assistant's earlier reasoning left out, is
    followed; any other change of a text, or of the template's own because of one, is refused. What
    an assistant says beside its tool calls may be left out. A system message that the template
    refuses or leaves out is put before the passages in the first user message; later ones are not.
    What the assistant said last is left open, as ``continue_final_message`` has it.
    """

    leading: tuple[int, ...] = ()

    def __init__(self, tokenizer: Any, kwargs: Mapping[str, Any]) -> None:
        self._reserved = inspect.signature(tokenizer.apply_chat_template).parameters.keys() - {
            "chat_template"
        }
        self._check(kwargs)
        self._tokenizer = tokenizer
        self._kwargs = dict(kwargs)

    def _check(self, kwargs: Mapping[str, Any]) -> None:
        if reserved := sorted(self._reserved & kwargs.keys()):
            raise PromptError(
                f"template_kwargs can't hold {reserved}, which the prompt sets itself. Use it for "
                "variables of the chat template, such as enable_thinking."
            )

    def cut(self, conversation: Conversation, *, slot: bool) -> tuple[list[Piece], list[Piece]]:
        """What stands before the passages, and after them; all of it after, without passages."""
        self._check(conversation.template_kwargs)
        asked = any(turn.role == "user" for turn in conversation.turns)
        if slot and not asked:
            raise PromptError(
                "Passages stand at the start of the first user message, but this conversation "
                'has none. Append the question as {"role": "user", "content": "..."}, or leave '
                "the passages out."
            )
        try:
            return self._cut_system(conversation, slot, asked)
        except _AlteredError:
            if not self._asks_time(conversation.template_kwargs):
                raise
            # The time that it writes may have changed between two renderings.
            return self._cut_system(conversation, slot, asked)

    @property
    def tells_time(self) -> bool:
        """Whether the template may write the time, as no variable was set in its place."""
        return not self._kwargs and self._asks_time({})

    def _asks_time(self, kwargs: Mapping[str, Any]) -> bool:
        return knows_variable(self._tokenizer, {**self._kwargs, **kwargs}, _CLOCK)

    def own_system(self) -> str:
        """The system message that the template writes where none is given; empty if none.

        Empty as well if it may tell the time, which would be another one tomorrow.
        """
        if self._asks_time({}):
            return ""
        filling = _Filling(Conversation.of("?"), system="Answer.", folded="", slot=True)
        plain = _Filling(Conversation.of("?"), system=None, folded="", slot=True)
        try:
            skeleton = self._render(Conversation.of("?"), filling)
            bare = self._render(Conversation.of("?"), plain)
        except _RefusedError:
            return ""
        mark = next(mark for mark, said in filling.said.items() if said.role == "system")
        before, _, rest = skeleton.partition(mark)
        behind = filling.marks.sub("", rest.partition(str(filling.slot))[0])
        without = plain.marks.sub("", bare.partition(str(plain.slot))[0])
        if not (without.startswith(before) and without.endswith(behind) and rest):
            return ""
        return without[len(before) : max(len(before), len(without) - len(behind))]

    def _cut_system(
        self, conversation: Conversation, slot: bool, asked: bool
    ) -> tuple[list[Piece], list[Piece]]:
        """The same for one time; a system message that is refused goes to the first user's."""
        system = conversation.system
        try:
            return self._cut(conversation, slot, system=system or None)
        except _RefusedError:
            if not system or not asked:
                raise
            return self._cut(conversation, slot, folded=f"{system}\n\n")

    def _cut(
        self, conversation: Conversation, slot: bool, system: str | None = None, folded: str = ""
    ) -> tuple[list[Piece], list[Piece]]:
        filling = _Filling(conversation, system=system, folded=folded, slot=slot)
        texts = {mark: said.text for mark, said in filling.said.items()}
        skeleton = self._render(conversation, filling)
        full = self._render(conversation, filling, texts)
        written = filling.marks.split(skeleton)
        shown = Counter(written)
        for mark, said in filling.said.items():
            if mark not in shown and not said.optional:
                kind = _RefusedError if said.role == "system" else PromptError
                raise kind(
                    f"The chat template leaves out message {said.message} (role {said.role!r}). "
                    "Shorten the conversation to what the template shows, or use another template."
                )
        if filling.slot is not None and (slots := shown[filling.slot]) != 1:
            raise PromptError(
                f"The chat template writes the first user message {slots} times, but passages can "
                "stand in one place only. Use another template."
            )
        if full != "".join(texts.get(part, part) for part in written):
            once = [part for part in written if part in filling.said and shown[part] == 1]
            # Two renderings, and not one for each text: the placeholders of its neighbours show
            # where a text begins and ends.
            for real in (set(once[::2]), set(once[1::2])):
                rendered = self._render(conversation, filling, real)
                texts |= _as_written(filling, real, written, rendered)
            if full != "".join(texts.get(part, part) for part in written):
                raise _altered()
        pieces = [
            Piece(texts.get(part, part), trusted=part not in texts) for part in written if part
        ]
        if conversation.opening:
            pieces.append(Piece(conversation.opening, trusted=True))
        if filling.slot is None:
            return [], pieces
        at = next(i for i, piece in enumerate(pieces) if piece.text == filling.slot)
        return pieces[:at], pieces[at + 1 :]

    def _render(
        self, conversation: Conversation, filling: _Filling, real: Collection[str] = ()
    ) -> str:
        variables = {**self._kwargs, **conversation.template_kwargs}
        if conversation.tools:
            variables["tools"] = deepcopy(list(conversation.tools))
        ending = "continue_final_message" if conversation.continued else "add_generation_prompt"
        variables[ending] = True
        messages = filling.messages(real)
        try:
            rendered = self._tokenizer.apply_chat_template(messages, tokenize=False, **variables)
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            # transformers shows the whole prompt where a template leaves the last message out.
            reason = str(error).partition("Final message to continue:")[0].rstrip(". ")
            raise _RefusedError(
                "The chat template refuses this conversation (roles: "
                f"{', '.join(filling.roles)}): {reason}. Change the messages to what it asks for: "
                "most templates want user and assistant in turn, beginning with the user."
            ) from error
        return str(rendered)


def _as_written(
    filling: _Filling, real: Collection[str], written: Sequence[str], rendered: str
) -> dict[str, str]:
    """What the template makes of some texts, of which no two stand side by side.

    ``written`` is what it makes of placeholders only, ``rendered`` is with these texts in place of
    theirs.
    """
    parts = iter(filling.marks.split(rendered))
    made: dict[str, str] = {}
    mark: str | None = None
    before = after = ""
    # The parts of a split are a text and a placeholder in turn, so the last one is a text.
    for number, part in enumerate([*written, ""]):
        if number % 2 == 0 and number < len(written):
            before, after = (before + part, "") if mark is None else (before, part)
        elif part in real:
            mark = part
        else:
            own = next(parts, "")
            if mark is not None:
                made[mark] = _text_as_written(filling.said[mark], before, own, after)
            if (mark is None and own != before) or next(parts, "") != part:
                only = [filling.said[one] for one in real] if len(real) == 1 else []
                raise _altered(*map(_named, only))
            mark, before, after = None, "", ""
    return made


def _text_as_written(said: _Said, before: str, own: str, after: str) -> str:
    """What the template makes of one text, between what it writes itself before and after it."""
    if own == before + said.text + after:
        return said.text
    inner = own[len(before) : len(own) - len(after)]
    text, shown = said.text.strip(), inner.strip()
    if (
        len(own) >= len(before) + len(after)
        and before + inner + after == own
        and (
            shown.casefold() == text.casefold()
            or (said.role == "assistant" and text.endswith(shown))
            or inner == json.dumps(said.text, ensure_ascii=False)[1:-1]
        )
    ):
        return inner
    raise _altered(_named(said))


def _named(said: _Said) -> str:
    return f"message {said.message} (role {said.role!r})"


class _RefusedError(PromptError):
    """The template raised, or left the system message out: worth a try without that message."""


class _AlteredError(PromptError):
    """Two renderings differ in more than the texts."""


def _altered(what: str = "the messages") -> _AlteredError:
    return _AlteredError(
        f"The chat template changes {what}, or its own text around it, in a way that can't be "
        "followed safely. Use a template that writes messages unchanged, or take the markup that "
        "it looks for out of the message."
    )
