"""A chat template, rendered once with placeholders and cut at them."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2.exceptions import TemplateError

from rag_windows.boundary import Piece
from rag_windows.conversation import Conversation, Message
from rag_windows.errors import PromptError

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

    The template sees a placeholder in place of each message and of the passages, so no text can
    steer it, and what it writes itself is known. A second rendering with the true messages tells
    what it makes of them: trimmed, upper- or lower-cased, or an assistant's earlier reasoning left
    out, is followed; any other change of a message, or of the template's own text because of a
    message's content, is refused. A system message that the template refuses or leaves out is put
    before the passages in the first user message.

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
        turns = list(conversation.turns)
        if not conversation.system:
            return self._cut(_Filling(turns, "", slot=slot))
        try:
            with_system = [Message("system", conversation.system), *turns]
            return self._cut(_Filling(with_system, "", slot=slot))
        except _RefusedError as refusal:
            try:
                return self._cut(_Filling(turns, conversation.system + "\n\n", slot=slot))
            except _RefusedError:
                raise refusal from None

    def _cut(self, filling: _Filling, attempts: int = 3) -> tuple[list[Piece], list[Piece]]:
        skeleton = self._render(filling.messages(set()))
        written = filling.marks.split(skeleton)
        for index, message in enumerate(filling.owners):
            if filling.mark(index) not in written:
                role = filling.turns[message].role
                kind = _RefusedError if role == "system" else PromptError
                raise kind(
                    f"The chat template leaves out message {message} (role {role!r}). Shorten the "
                    "conversation to what the template shows, or use another template."
                )
        slots = written.count(filling.mark(_SLOT))
        if filling.slot and slots != 1:
            raise PromptError(
                f"The chat template writes the first user message {slots} times; passages can "
                "stand in one place only. Use another template."
            )
        texts = list(filling.texts)
        full = self._render(filling.messages(set(range(len(texts)))))
        if full != filling.fill(written, texts):
            if attempts > 1 and self._render(filling.messages(set())) != skeleton:
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
        at = next(i for i, piece in enumerate(pieces) if piece.text == filling.mark(_SLOT))
        return pieces[:at], pieces[at + 1 :]

    def _as_written(self, filling: _Filling, skeleton: str, index: int) -> str:
        """What the template makes of one text, the others being placeholders."""
        text, mark = filling.texts[index], filling.mark(index)
        rendered = self._render(filling.messages({index}))
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
        raise _altered(f"message {filling.owners[index]}", f" (role {role!r})")

    def _render(self, messages: Sequence[Mapping[str, str]]) -> str:
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    [dict(message) for message in messages],
                    tokenize=False,
                    add_generation_prompt=True,
                    **self._kwargs,
                )
            )
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            roles = ", ".join(message["role"] for message in messages)
            raise _RefusedError(
                f"The chat template refuses this conversation (roles: {roles}): {error}. Bring the "
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


_SLOT = -1


class _Filling:
    """Messages whose texts can be swapped for placeholders that no text can forge.

    Attributes:
        turns: the messages.
        slot: whether the passages' placeholder stands in the first user message.
        texts: the untrusted texts, empty ones left out.
        owners: for each text, the index of its message.
        index: placeholder -> index into ``texts``.
        marks: matches any placeholder, as a group.
    """

    def __init__(self, turns: list[Message], folded: str, *, slot: bool) -> None:
        self.turns = turns
        self.slot = slot
        self.texts: list[str] = []
        self.owners: list[int] = []
        self._layout: list[list[int]] = []
        first_user = next(i for i, turn in enumerate(turns) if turn.role == "user")
        for i, turn in enumerate(turns):
            layout = self._add(folded, i) if i == first_user else []
            if slot and i == first_user:
                layout.append(_SLOT)
            self._layout.append(layout + self._add(turn.content, i))
        self._nonce = _nonce()
        while any(self._nonce in text for text in self.texts):
            self._nonce = _nonce()
        self.index = {self.mark(i): i for i in range(len(self.texts))}
        self.marks = re.compile(f"({self._nonce}[\ue100-\uf0ff]{{2}})")

    def _add(self, text: str, message: int) -> list[int]:
        if not text:
            return []
        self.texts.append(text)
        self.owners.append(message)
        return [len(self.texts) - 1]

    def mark(self, index: int) -> str:
        """Placeholder of a text, or of the passages: private-use characters survive trimming."""
        high, low = divmod(index + 1, 4096)
        return f"{self._nonce}{chr(0xE100 + high)}{chr(0xE100 + low)}"

    def messages(self, real: set[int]) -> list[dict[str, str]]:
        """Messages with the true texts where their index is in ``real``, else placeholders."""
        return [
            {
                "role": turn.role,
                "content": "".join(self.texts[i] if i in real else self.mark(i) for i in layout),
            }
            for turn, layout in zip(self.turns, self._layout, strict=True)
        ]

    def fill(self, written: Sequence[str], texts: Sequence[str]) -> str:
        """The rendered prompt with texts in place of their placeholders."""
        return "".join(texts[self.index[p]] if p in self.index else p for p in written)


def _nonce() -> str:
    return "".join(chr(0xE000 + secrets.randbelow(256)) for _ in range(16))
