"""A chat template, rendered once with placeholders and cut at them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from jinja2.exceptions import TemplateError

from rag_windows.boundary import Piece
from rag_windows.conversation import Conversation
from rag_windows.errors import PromptError
from rag_windows.filling import SLOT, Filling
from rag_windows.tool_calls import tool_names

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
