"""Conversations as the model's chat template, or plain text, writes them."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Collection, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from jinja2.exceptions import TemplateError

from rag_windows.errors import PromptError
from rag_windows.prompt.conversation import Conversation, Message, ToolCall, strings, tool_names
from rag_windows.prompt.tokenizing import Piece

_NONCE = 16
"""Characters in which the placeholders of one conversation differ from all others'."""


@dataclass(frozen=True, slots=True)
class _Said:
    """An untrusted text.

    Attributes:
        text: that stands in the place of its placeholder.
        message: index of the message that it belongs to.
        encoded: whether a template may write it as a JSON string.
        optional: whether a template may leave it out, as what an assistant says beside its calls.
    """

    text: str
    message: int
    encoded: bool
    optional: bool


class Filling:
    """The messages of one conversation with a placeholder for each untrusted text.

    Attributes:
        roles: of the messages.
        continued: whether the answer goes on with the last one.
        tools: definitions of tools, for the template.
        slot: the placeholder of the passages; None without passages.
        said: placeholder -> text: contents, and strings of tool calls; empty ones have none.
        marks: matches any placeholder, as a group.

    Args:
        conversation: the turns and tools.
        system: the instruction as a message of its own, or None.
        folded: text put before the passages in the first user message.
        slot: whether there are passages.
    """

    def __init__(
        self, conversation: Conversation, *, system: str | None, folded: str, slot: bool
    ) -> None:
        turns = [Message("system", system)] if system is not None else []
        turns += conversation.turns
        self.roles = [turn.role for turn in turns]
        self.continued = conversation.continued
        self.tools = conversation.tools
        self.said: dict[str, _Said] = {}
        self._nonce = _nonce()
        given = [folded, *(turn.content for turn in turns)]
        given += [s for turn in turns for c in turn.calls for s in strings([c.name, c.arguments])]
        while any(self._nonce in text for text in given):
            self._nonce = _nonce()
        self.marks = re.compile(f"({self._nonce}[\ue100-\uf0ff]{{2}})")
        self.slot = self._mark(0) if slot else None
        first_user = next((i for i, role in enumerate(self.roles) if role == "user"), None)
        self._messages: list[dict[str, Any]] = []
        for number, turn in enumerate(turns):
            before = ""
            if number == first_user:
                before = self._put(folded, number) + (self.slot or "")
            told = turn.role == "tool"
            own = self._put(turn.content, number, encoded=told, optional=bool(turn.calls))
            message: dict[str, Any] = {"role": turn.role, "content": before + own}
            if turn.calls:
                message["tool_calls"] = [self._call(call, number) for call in turn.calls]
            if turn.call_id is not None:
                message["tool_call_id"] = turn.call_id
            if turn.name is not None:
                message["name"] = turn.name
            self._messages.append(message)

    def messages(self, real: Collection[str] = ()) -> list[dict[str, Any]]:
        """A copy of the messages, with the true texts in place of some placeholders."""

        def text(match: re.Match[str]) -> str:
            return self.said[match[0]].text if match[0] in real else match[0]

        def copied(value: Any) -> Any:
            if isinstance(value, str):
                return self.marks.sub(text, value)
            if isinstance(value, dict):
                return {copied(key): copied(entry) for key, entry in value.items()}
            return [copied(entry) for entry in value] if isinstance(value, list) else value

        return [copied(message) for message in self._messages]

    def _mark(self, index: int) -> str:
        """A placeholder: private-use characters survive trimming."""
        high, low = divmod(index, 4096)
        return f"{self._nonce}{chr(0xE100 + high)}{chr(0xE100 + low)}"

    def _put(
        self, text: str, message: int, *, encoded: bool = False, optional: bool = False
    ) -> str:
        """The placeholder of a text, or nothing for none."""
        if not text:
            return ""
        mark = self._mark(len(self.said) + 1)
        self.said[mark] = _Said(text, message, encoded, optional)
        return mark

    def _call(self, call: ToolCall, message: int) -> dict[str, Any]:
        def put(value: Any) -> Any:
            if isinstance(value, str):
                return self._put(value, message, encoded=True)
            if isinstance(value, Mapping):
                return {put(key): put(entry) for key, entry in value.items()}
            return [put(entry) for entry in value] if isinstance(value, list) else value

        identity = {} if call.id is None else {"id": call.id}
        function = {"name": put(call.name), "arguments": put(call.arguments)}
        return {**identity, "type": "function", "function": function}


def _nonce() -> str:
    return "".join(chr(0xE000 + secrets.randbelow(256)) for _ in range(_NONCE))


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


_RESERVED = frozenset(
    {
        "conversation",
        "messages",
        "tools",
        "documents",
        "tokenize",
        "add_generation_prompt",
        "continue_final_message",
        "return_dict",
        "return_tensors",
        "return_assistant_tokens_mask",
        "sanitize_control_tokens",
        "padding",
        "truncation",
        "max_length",
        "tokenizer_kwargs",
    }
)


class ChatTemplate:
    """The chat template of a tokenizer.

    The template sees a placeholder in place of each message, of each string in a tool call and of
    the passages, so no text can steer it, and what it writes itself is known. A second rendering
    with the true texts tells what it makes of them: trimmed, upper- or lower-cased, written as a
    JSON string (tool calls and their results), or an assistant's earlier reasoning left out, is
    followed; any other change of a text, or of the template's own because of one, is refused. What
    an assistant says beside its tool calls may be left out. A system message that the template
    refuses or leaves out is put before the passages in the first user message; later ones are not.
    What the assistant said last is left open, as ``continue_final_message`` has it.

    Attributes:
        leading: no ids: a template writes its own beginning.
        begins_in_text: True: windows continue what the template writes.

    Args:
        tokenizer: a transformers tokenizer with a chat template.
        kwargs: further variables of the template, such as ``enable_thinking``.

    Raises:
        PromptError: ``kwargs`` holds an argument that the prompt sets itself.
    """

    leading: tuple[int, ...] = ()
    begins_in_text = True

    def __init__(self, tokenizer: Any, kwargs: Mapping[str, Any]) -> None:
        reserved = sorted(_RESERVED & kwargs.keys())
        if reserved:
            raise PromptError(
                f"template_kwargs can't hold {reserved}: the prompt sets them itself. It is for "
                "variables of the chat template, such as enable_thinking."
            )
        self._tokenizer = tokenizer
        self._kwargs = dict(kwargs)

    def cut(self, conversation: Conversation, *, slot: bool) -> tuple[list[Piece], list[Piece]]:
        """What stands before the passages, and after them.

        Args:
            conversation: instruction and turns.
            slot: whether there are passages; without, everything comes in the second list.

        Raises:
            PromptError: the template refuses the conversation, or treats a message in a way that
                can't be followed.
        """
        if slot and not conversation.asked:
            raise PromptError(
                "Passages stand at the start of the first user message, and this conversation has "
                'none. Append the question as {"role": "user", "content": "..."}, or leave the '
                "passages out."
            )
        system = conversation.system
        try:
            filling = Filling(conversation, system=system or None, folded="", slot=slot)
            before, after = self._cut(filling)
        except _RefusedError as refusal:
            if not system or not conversation.asked:
                raise
            try:
                folded = f"{system}\n\n"
                filling = Filling(conversation, system=None, folded=folded, slot=slot)
                before, after = self._cut(filling)
            except _RefusedError:
                raise refusal from None
        opening = [Piece(conversation.opening, trusted=True)] if conversation.opening else []
        return before, after + opening

    def _cut(self, filling: Filling, attempts: int = 3) -> tuple[list[Piece], list[Piece]]:
        skeleton = self._render(filling)
        written = filling.marks.split(skeleton)
        for mark, said in filling.said.items():
            if mark not in written and not said.optional:
                role = filling.roles[said.message]
                kind = _RefusedError if role == "system" else PromptError
                raise kind(
                    f"The chat template leaves out message {said.message} (role {role!r}). Shorten "
                    "the conversation to what the template shows, or use another template."
                )
        hidden = [name for name in tool_names(filling.tools) if name not in skeleton]
        if hidden:
            raise PromptError(
                f"The chat template does not show the tools {hidden} to the model. Leave the tools "
                "out, or use a model whose template supports them."
            )
        if filling.slot is not None and (slots := written.count(filling.slot)) != 1:
            raise PromptError(
                f"The chat template writes the first user message {slots} times; passages can "
                "stand in one place only. Use another template."
            )
        texts = {mark: said.text for mark, said in filling.said.items()}
        full = self._render(filling, texts)
        if full != "".join(texts.get(part, part) for part in written):
            if attempts > 1 and self._render(filling) != skeleton:
                return self._cut(filling, attempts - 1)  # it shows the time, and that moved on
            texts = {mark: self._as_written(filling, skeleton, mark) for mark in texts}
            if full != "".join(texts.get(part, part) for part in written):
                raise _altered("the messages", "")
        pieces = [
            Piece(texts.get(part, part), trusted=part not in texts) for part in written if part
        ]
        if filling.slot is None:
            return [], pieces
        at = next(i for i, piece in enumerate(pieces) if piece.text == filling.slot)
        return pieces[:at], pieces[at + 1 :]

    def _as_written(self, filling: Filling, skeleton: str, mark: str) -> str:
        """What the template makes of one text, the others being placeholders."""
        said = filling.said[mark]
        text, role = said.text, filling.roles[said.message]
        rendered = self._render(filling, {mark})
        if rendered == skeleton.replace(mark, text):
            return text
        before, _, after = skeleton.partition(mark)
        kept = rendered[len(before) : len(rendered) - len(after)]
        shown = kept.strip()
        if (
            mark not in after
            and len(rendered) >= len(before) + len(after)
            and before + kept + after == rendered
            and (
                shown.casefold() == text.strip().casefold()
                or (role == "assistant" and text.strip().endswith(shown))
                or (said.encoded and kept == json.dumps(text, ensure_ascii=False)[1:-1])
            )
        ):
            return kept
        raise _altered(f"message {said.message}", f" (role {role!r})")

    def _render(self, filling: Filling, real: Collection[str] = ()) -> str:
        variables = dict(self._kwargs)
        if filling.tools:
            variables["tools"] = deepcopy(list(filling.tools))
        ending = "continue_final_message" if filling.continued else "add_generation_prompt"
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    filling.messages(real),
                    tokenize=False,
                    **{ending: True},
                    **variables,
                )
            )
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            # transformers shows the whole prompt where a template leaves the last message out.
            told = str(error).partition("Final message to continue:")[0].rstrip(". ")
            raise _RefusedError(
                f"The chat template refuses this conversation (roles: {', '.join(filling.roles)}): "
                f"{told}. Bring the messages into the form it asks for; most want user and "
                "assistant in turn, beginning with the user."
            ) from error


class _RefusedError(PromptError):
    """The template raised, or left the system message out: worth a try without that message."""


def _altered(what: str, detail: str) -> PromptError:
    return PromptError(
        f"The chat template changes {what}{detail}, or its own text because of it, in a way that "
        "can't be followed safely. Use a template that writes messages as they are, or take the "
        "markup that it looks for out of the message."
    )
