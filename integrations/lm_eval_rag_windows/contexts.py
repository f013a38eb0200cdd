"""Prompts that still know what they are made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jinja2.exceptions import TemplateError

from lm_eval_rag_windows.borders import Borders
from lm_eval_rag_windows.tokens import common_length
from rag_windows.errors import PromptError
from rag_windows.prompt.conversation import Conversation
from rag_windows.prompt.template import ChatTemplate
from rag_windows.prompt.tokenizing import Boundary, Piece

_MARK = "\ue000\ue001\ue002"
"""Private-use characters, which survive a template's trimming; no text of a user meets them."""


class ChatContext(str):
    """A prompt written by a chat template, as the string that the harness passes on.

    What makes a plain string of it (``strip``, ``+``) loses the parts.

    Attributes:
        pieces: the same text; what the template wrote is trusted, messages are not.
        borders: of the turns that are examples; None where all stands in one user message.
        content: start and end of that message, in characters; None with ``borders``.
    """

    pieces: tuple[Piece, ...] = ()
    borders: Borders | None = None
    content: tuple[int, int] | None = None

    def __getnewargs__(self) -> tuple[str]:
        # The harness keeps requests in pickles of its own, if asked to.
        return (str(self),)


class ChatWriter:
    """Writes conversations with examples by a tokenizer's chat template.

    Args:
        tokenizer: with a chat template.
        kwargs: further variables of the template.

    Raises:
        PromptError: there is no template, or an argument in ``kwargs`` that is set here.
    """

    def __init__(self, tokenizer: Any, boundary: Boundary, kwargs: Mapping[str, Any]) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise PromptError(
                "This model has no chat template: leave --apply_chat_template out, or use a model "
                "that has one."
            )
        self._tokenizer = tokenizer
        self._kwargs = dict(kwargs)
        self._template = ChatTemplate(tokenizer, kwargs)
        self._controls = boundary.controls
        self._tail = self._written_behind_an_answer()

    def write(
        self, history: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True
    ) -> ChatContext:
        """Render a conversation whose last user turn is the question.

        Args:
            history: ``{"role": ..., "content": ...}`` each; turns that an assistant's message ends
                are examples.
            add_generation_prompt: False if the last message is how the assistant's answer begins.

        Raises:
            PromptError: the template refuses the conversation, or can't be followed.
        """
        turns, begun = list(history), ""
        if not add_generation_prompt:
            if not turns or turns[-1].get("role") != "assistant":
                raise PromptError(
                    "Without a generation prompt, the last message must be the assistant's: how "
                    "its answer begins."
                )
            begun = turns.pop()["content"]
        conversation = Conversation.of(turns)
        _, pieces = self._template.cut(conversation, slot=False)
        if begun:
            pieces = self._begun(pieces, history, begun)
        context = ChatContext("".join(piece.text for piece in pieces))
        context.pieces = tuple(pieces)
        said = [("system", conversation.system), *((t.role, t.content) for t in conversation.turns)]
        roles = [role for role, text in said if text]
        spans = _untrusted(pieces)[: len(roles)]
        if len(spans) == len(roles):
            asked = [span for span, role in zip(spans, roles, strict=True) if role == "user"]
            if len(asked) == 1:
                context.content = asked[0]
            else:
                context.borders = self._borders(context, roles, spans)
        return context

    def _begun(
        self, pieces: list[Piece], history: Sequence[Mapping[str, Any]], begun: str
    ) -> list[Piece]:
        """With the beginning of the answer, where the template would write it."""
        said = pieces[:-1] if pieces[-1].trusted else pieces
        base = "".join(piece.text for piece in said)
        try:
            whole = self._tokenizer.apply_chat_template(
                list(history), tokenize=False, continue_final_message=True, **self._kwargs
            )
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError):
            whole = ""
        for text in (begun, begun.strip()):
            header = str(whole)[len(base) :].removesuffix(text)
            if text and f"{base}{header}{text}" == whole:
                return [*said, *([Piece(header, trusted=True)] if header else []), Piece(text)]
        # The template refuses a system message, or writes the answer's beginning some other way.
        return [*pieces, Piece(begun)]

    def _borders(
        self, text: str, roles: Sequence[str], spans: Sequence[tuple[int, int]]
    ) -> Borders:
        """Examples end behind what the template writes behind an assistant's message."""
        ends, header = [], ""
        for index in range(len(roles) - 1):
            if (roles[index], roles[index + 1]) == ("assistant", "user"):
                between = text[spans[index][1] : spans[index + 1][0]]
                closing = self._common(between)
                header = header or between[closing:]
                ends.append(spans[index][1] + closing)
        if not ends:
            return Borders()
        start = spans[roles.index("user")][0]
        # The first example begins with the same header as the others, where there is one.
        return Borders(start - len(header) if text[:start].endswith(header) else start, tuple(ends))

    def _common(self, between: str) -> int:
        """Length of what closes a turn, in the text between two turns; no token is cut."""
        length = common_length(between, self._tail)
        for found in self._controls.spelled.finditer(between):
            if found.start() < length < found.end():
                return found.start()
        return length

    def _written_behind_an_answer(self) -> str:
        turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": _MARK}]
        try:
            text = self._tokenizer.apply_chat_template(
                turns, tokenize=False, add_generation_prompt=False, **self._kwargs
            )
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError):
            # Then examples are cut right behind the answer.
            return ""
        return str(text).rpartition(_MARK)[2] if _MARK in text else ""


def _untrusted(pieces: Sequence[Piece]) -> list[tuple[int, int]]:
    spans, at = [], 0
    for piece in pieces:
        if not piece.trusted:
            spans.append((at, at + len(piece.text)))
        at += len(piece.text)
    return spans
