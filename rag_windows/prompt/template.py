"""Conversations as the model's chat template, or plain text, writes them."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

from jinja2.exceptions import TemplateError

from rag_windows.errors import PromptError
from rag_windows.prompt.conversation import Conversation, Message
from rag_windows.prompt.tokenizing import Piece
from rag_windows.prompt.tool_calls import ToolCall, tool_names

SLOT = -1
"""Index of the placeholder of the passages."""


class Filling:
    """The messages of one conversation as a chat template gets them.

    Attributes:
        turns: the messages.
        continued: whether the answer goes on with the last one.
        tools: definitions of tools, for the template.
        slot: whether the passages' placeholder stands in the first user message.
        texts: the untrusted texts, empty ones left out: contents, and strings of tool calls.
        owners: for each text, the index of its message.
        encoded: indices of texts that a template may write as JSON strings.
        optional: indices of texts that a template may leave out: what an assistant says beside
            its calls.
        index: placeholder -> index into ``texts``.
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
        self.turns = [Message("system", system)] if system is not None else []
        self.turns += conversation.turns
        self.continued = conversation.continued
        self.tools = conversation.tools
        self.slot = slot
        self.texts: list[str] = []
        self.owners: list[int] = []
        self.encoded: set[int] = set()
        self.optional: set[int] = set()
        self._contents: list[list[int]] = []
        self._calls: list[list[Any]] = []
        first_user = next((i for i, turn in enumerate(self.turns) if turn.role == "user"), None)
        for i, turn in enumerate(self.turns):
            layout = self._add(folded, i) if i == first_user else []
            if slot and i == first_user:
                layout.append(SLOT)
            own = self._add(turn.content, i)
            if turn.role == "tool":
                self.encoded.update(own)
            if turn.calls:
                self.optional.update(own)
            self._contents.append(layout + own)
            self._calls.append([self._call(call, i) for call in turn.calls])
        self._nonce = _nonce()
        while any(self._nonce in text for text in self.texts):
            self._nonce = _nonce()
        self.index = {self.mark(i): i for i in range(len(self.texts))}
        self.marks = re.compile(f"({self._nonce}[\ue100-\uf0ff]{{2}})")

    def mark(self, index: int) -> str:
        """Placeholder of a text, or of the passages: private-use characters survive trimming."""
        high, low = divmod(index + 1, 4096)
        return f"{self._nonce}{chr(0xE100 + high)}{chr(0xE100 + low)}"

    def messages(self, real: set[int]) -> list[dict[str, Any]]:
        """Messages with the true texts where their index is in ``real``, else placeholders."""

        def text(indices: Sequence[int]) -> str:
            return "".join(self.texts[i] if i in real else self.mark(i) for i in indices)

        def value(shape: Any) -> Any:
            if isinstance(shape, _Text):
                return text(shape)
            if isinstance(shape, dict):
                return {value(key): value(entry) for key, entry in shape.items()}
            return [value(entry) for entry in shape] if isinstance(shape, list) else shape

        made: list[dict[str, Any]] = []
        for turn, content, calls in zip(self.turns, self._contents, self._calls, strict=True):
            message: dict[str, Any] = {"role": turn.role, "content": text(content)}
            if calls:
                message["tool_calls"] = [value(call) for call in calls]
            if turn.call_id is not None:
                message["tool_call_id"] = turn.call_id
            if turn.name is not None:
                message["name"] = turn.name
            made.append(message)
        return made

    def fill(self, written: Sequence[str], texts: Sequence[str]) -> str:
        """The rendered prompt with texts in place of their placeholders."""
        return "".join(texts[self.index[p]] if p in self.index else p for p in written)

    def _add(self, text: str, message: int) -> list[int]:
        if not text:
            return []
        self.texts.append(text)
        self.owners.append(message)
        return [len(self.texts) - 1]

    def _call(self, call: ToolCall, message: int) -> dict[str, Any]:
        function = {
            "name": self._shape(call.name, message),
            "arguments": self._shape(call.arguments, message),
        }
        identity = {} if call.id is None else {"id": call.id}
        return {**identity, "type": "function", "function": function}

    def _shape(self, value: Any, message: int) -> Any:
        """JSON data with its strings, keys included, turned into texts."""
        if isinstance(value, str):
            indices = self._add(value, message)
            self.encoded.update(indices)
            return _Text(indices)
        if isinstance(value, Mapping):
            return {self._shape(k, message): self._shape(v, message) for k, v in value.items()}
        if isinstance(value, list):
            return [self._shape(entry, message) for entry in value]
        return value


class _Text(tuple[int, ...]):
    """Indices of the texts that make a string; none for an empty one."""

    __slots__ = ()


def _nonce() -> str:
    return "".join(chr(0xE000 + secrets.randbelow(256)) for _ in range(16))


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
        before, after = self._cut_with_system(conversation, slot)
        opening = [Piece(conversation.opening, trusted=True)] if conversation.opening else []
        return before, after + opening

    def _cut_with_system(
        self, conversation: Conversation, slot: bool
    ) -> tuple[list[Piece], list[Piece]]:
        system = conversation.system
        try:
            return self._cut(Filling(conversation, system=system or None, folded="", slot=slot))
        except _RefusedError as refusal:
            if not system or not conversation.asked:
                raise
            try:
                folded = system + "\n\n"
                return self._cut(Filling(conversation, system=None, folded=folded, slot=slot))
            except _RefusedError:
                raise refusal from None

    def _cut(self, filling: Filling, attempts: int = 3) -> tuple[list[Piece], list[Piece]]:
        skeleton = self._render(filling, set())
        written = filling.marks.split(skeleton)
        for index, message in enumerate(filling.owners):
            if filling.mark(index) not in written and index not in filling.optional:
                role = filling.turns[message].role
                kind = _RefusedError if role == "system" else PromptError
                raise kind(
                    f"The chat template leaves out message {message} (role {role!r}). Shorten the "
                    "conversation to what the template shows, or use another template."
                )
        hidden = [name for name in tool_names(filling.tools) if name not in skeleton]
        if hidden:
            raise PromptError(
                f"The chat template does not show the tools {hidden} to the model. Leave the tools "
                "out, or use a model whose template supports them."
            )
        slots = written.count(filling.mark(SLOT))
        if filling.slot and slots != 1:
            raise PromptError(
                f"The chat template writes the first user message {slots} times; passages can "
                "stand in one place only. Use another template."
            )
        texts = list(filling.texts)
        full = self._render(filling, set(range(len(texts))))
        if full != filling.fill(written, texts):
            if attempts > 1 and self._render(filling, set()) != skeleton:
                return self._cut(filling, attempts - 1)  # it shows the time, and that moved on
            texts = [self._as_written(filling, skeleton, index) for index in range(len(texts))]
            if full != filling.fill(written, texts):
                raise _altered("the messages", "")
        pieces = [
            Piece(texts[filling.index[part]])
            if part in filling.index
            else Piece(part, trusted=True)
            for part in written
            if part
        ]
        if not filling.slot:
            return [], pieces
        at = next(i for i, piece in enumerate(pieces) if piece.text == filling.mark(SLOT))
        return pieces[:at], pieces[at + 1 :]

    def _as_written(self, filling: Filling, skeleton: str, index: int) -> str:
        """What the template makes of one text, the others being placeholders."""
        text, mark = filling.texts[index], filling.mark(index)
        rendered = self._render(filling, {index})
        if rendered == skeleton.replace(mark, text):
            return text
        role = filling.turns[filling.owners[index]].role
        before, _, after = skeleton.partition(mark)
        kept = rendered[len(before) : len(rendered) - len(after)]
        whole = len(rendered) >= len(before) + len(after)
        if mark in after or not whole or before + kept + after != rendered:
            raise _altered(f"message {filling.owners[index]}", f" (role {role!r})")
        shown = kept.strip()
        if shown.casefold() == text.strip().casefold():
            return kept
        if role == "assistant" and text.strip().endswith(shown):
            return kept
        if index in filling.encoded and kept == json.dumps(text, ensure_ascii=False)[1:-1]:
            return kept
        raise _altered(f"message {filling.owners[index]}", f" (role {role!r})")

    def _render(self, filling: Filling, real: set[int]) -> str:
        messages = filling.messages(real)
        tools = {"tools": deepcopy(list(filling.tools))} if filling.tools else {}
        ending = "continue_final_message" if filling.continued else "add_generation_prompt"
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    messages, tokenize=False, **{ending: True}, **tools, **self._kwargs
                )
            )
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            roles = ", ".join(message["role"] for message in messages)
            # transformers shows the whole prompt where a template leaves the last message out.
            told = str(error).partition("Final message to continue:")[0].rstrip(". ")
            raise _RefusedError(
                f"The chat template refuses this conversation (roles: {roles}): {told}. Bring the "
                "messages into the form it asks for; most want user and assistant in turn, "
                "beginning with the user."
            ) from error


class _RefusedError(PromptError):
    """The template raised, or left the system message out: worth a try without that message."""


def _altered(what: str, detail: str) -> PromptError:
    return PromptError(
        f"The chat template changes {what}{detail}, or its own text because of it, in a way that "
        "can't be followed safely. Use a template that writes messages as they are, or take the "
        "markup that it looks for out of the message."
    )
