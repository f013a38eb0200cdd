"""From a question and passages to token ids: prefix, one window a passage, query.

A chat model's own template is cut at the passages (``template``); a model without one gets a plain
layout (``base_layout``). Passages stand at the start of the first user message: the prefix is what
comes before them (instruction, role markers), the query is the question, the rest of the
conversation and the assistant's header. No beginning-of-sequence token is added to what a template
writes, as ``tokenizer.apply_chat_template`` does it.

A window is the header line (where there is one), the text, and a blank line.

Text is encoded by ``boundary.Boundary``; ``control_tokens`` holds its rule. Windows and the query
continue a prompt, so SentencePiece's dummy prefix (a space before a text) is left out, as in one
prompt that holds it all. Only where a base model's prefix holds no text do windows begin one.

Without passages (none given, or all blank) everything is in the query, tokenized in one go, with
the ids of ``apply_chat_template(..., tokenize=True, add_generation_prompt=True)``.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rag_windows.base_layout import BaseLayout
from rag_windows.boundary import Boundary
from rag_windows.conversation import Conversation
from rag_windows.errors import LimitError, PromptError
from rag_windows.fast_text import At
from rag_windows.headers import Header, header_function
from rag_windows.passage import Passage
from rag_windows.splitting import TooLittleRoomError, split
from rag_windows.template import ChatTemplate
from rag_windows.tool_calls import strings, tool_names


@dataclass(frozen=True, slots=True)
class WindowTokens:
    """One window.

    Attributes:
        ids: token ids, header and closing blank line included.
        passage: index into the passages as given.
        part: index of this window among the passage's windows.
        parts: number of the passage's windows.
        start: first character of ``passage.text`` in it.
        end: character of ``passage.text`` behind its last one.
    """

    ids: tuple[int, ...]
    passage: int
    part: int
    parts: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Note:
    """Something the caller should know about a passage.

    Attributes:
        kind: ``blank`` and ``duplicate`` passages make no window of their own; a ``split`` one
            makes several.
        passage: index into the passages as given.
        message: the same in words.
        of: for a duplicate, the index of the first passage that equals it.
    """

    kind: Literal["blank", "duplicate", "split"]
    passage: int
    message: str
    of: int | None = None


@dataclass(frozen=True, slots=True)
class PromptParts:
    """A prompt in token ids: the prefix, the windows in the order of their passages, the query."""

    prefix_ids: tuple[int, ...]
    windows: tuple[WindowTokens, ...]
    query_ids: tuple[int, ...]
    notes: tuple[Note, ...]


class Prompt:
    """Builds prompts for one tokenizer; safe to use from several threads.

    Args:
        tokenizer: a transformers tokenizer, fast or Python. It is read when the prompt is made;
            tokens added to it later are not seen.
        header: ``none``, ``title``, ``number``, ``number+title``, or a function of a passage and
            its 1-based number among the passages as given.
        template_kwargs: further variables of the chat template, such as ``enable_thinking``.
        text_tokens: special or added tokens that text may produce, where ordinary text is spelled
            with one (a padding token ``!``, words added to the vocabulary).

    Raises:
        PromptError: an unknown header, a tokenizer of a foreign kind, or a name in ``text_tokens``
            or ``template_kwargs`` that does not belong there.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        header: Header = "title",
        template_kwargs: Mapping[str, Any] | None = None,
        text_tokens: Collection[str] = (),
    ) -> None:
        self._header = header_function(header)
        self._boundary = Boundary(tokenizer, text_tokens)
        self._layout: ChatTemplate | BaseLayout = (
            ChatTemplate(tokenizer, template_kwargs or {})
            if getattr(tokenizer, "chat_template", None)
            else BaseLayout(tokenizer)
        )

    @property
    def is_chat(self) -> bool:
        """Whether the model has a chat template."""
        return isinstance(self._layout, ChatTemplate)

    def without_header(self) -> Prompt:
        """The same with windows that hold nothing but their text."""
        other = copy.copy(self)
        other._header = header_function("none")
        return other

    def encode_text(self, text: str, *, continuation: bool = False) -> list[int]:
        """Ids of untrusted text; never a control token.

        Args:
            text: any text.
            continuation: whether the text goes on after other text, so that no dummy prefix is
                put before it. Without, the ids are those of
                ``tokenizer(text, add_special_tokens=False)`` unless these hold a control token.

        Raises:
            PromptError: a character of the text is itself a control token.
        """
        return self._boundary.encode(text, "text" if continuation else "start")

    def build(
        self,
        query: str | Sequence[Mapping[str, Any]] | Conversation,
        passages: Sequence[Passage],
        *,
        prefix: str | None = None,
        max_window_tokens: int | None = None,
    ) -> PromptParts:
        """Tokenize a question with its passages.

        Args:
            query: the question, or messages with ``role`` and ``content``, see `Conversation.of`,
                or a `Conversation`.
            passages: in any number; blank and repeated ones make no window and are noted.
            prefix: the instruction (system prompt); goes before a leading system message.
            max_window_tokens: greatest length of a window; a longer passage becomes several
                windows, each with the header, that cover its text without gap or overlap.

        Raises:
            PromptError: the conversation, the template, the header or a text can't be used.
            LimitError: a passage can't be cut into windows of ``max_window_tokens``.
        """
        if max_window_tokens is not None and max_window_tokens < 1:
            raise LimitError(f"max_window_tokens must be at least 1, not {max_window_tokens}.")
        conversation = Conversation.of(query, prefix)
        in_text = self._layout.begins_in_text or bool(conversation.system)
        at: At = "text" if in_text else "start"
        windows: list[WindowTokens] = []
        notes: list[Note] = []
        first: dict[tuple[str, str], int] = {}
        for index, passage in enumerate(map(Passage.of, passages)):
            name = f"Passage {index}" + (f" (id {passage.id!r})" if passage.id is not None else "")
            if not passage.text.strip():
                notes.append(Note("blank", index, f"{name} has no text and made no window."))
                continue
            same = first.setdefault((passage.title or "", passage.text), index)
            if same != index:
                message = f"{name} repeats passage {same} and made no window of its own."
                notes.append(Note("duplicate", index, message, of=same))
                continue
            made = self._windows(passage, index, name, at, max_window_tokens)
            if not made:
                message = f"{name} has no text that this tokenizer knows and made no window."
                notes.append(Note("blank", index, message))
            if len(made) > 1:
                message = (
                    f"{name} is longer than max_window_tokens={max_window_tokens} and became "
                    f"{len(made)} windows."
                )
                notes.append(Note("split", index, message))
            windows += made
        prefix_ids, query_ids = self.around(conversation, windows=bool(windows))
        return PromptParts(prefix_ids, tuple(windows), query_ids, tuple(notes))

    def around(
        self,
        query: str | Sequence[Mapping[str, Any]] | Conversation,
        *,
        prefix: str | None = None,
        windows: bool = True,
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """What stands before the windows and behind them: the prefix's ids and the query's.

        Args:
            query: as in `build`.
            prefix: as in `build`.
            windows: whether there are any; without, everything is in the query.

        Raises:
            PromptError: the question is blank, or as in `build`.
        """
        conversation = Conversation.of(query, prefix)
        _check_question(conversation)
        self._check_tools(conversation.tools)
        before, after = self._layout.cut(conversation, slot=windows)
        leading = tuple(self._layout.leading)
        if not windows:
            return (), (*leading, *self._boundary.encode_pieces(after))
        prefix_ids = (*leading, *self._boundary.encode_pieces(before))
        return prefix_ids, tuple(self._boundary.encode_pieces(after, "text"))

    def _check_tools(self, tools: Sequence[Mapping[str, Any]]) -> None:
        """A template writes tools itself, so their text must hold no control token."""
        for tool, name in zip(tools, tool_names(tools), strict=True):
            for text in strings(tool):
                found = self._boundary.controls.spelled.search(text)
                if found:
                    raise PromptError(
                        f"The definition of tool {name!r} holds the control token {found[0]!r}; "
                        "take it out of its description and parameters."
                    )

    def _windows(
        self, passage: Passage, index: int, name: str, at: At, limit: int | None
    ) -> list[WindowTokens]:
        header = self._header(passage, index + 1)
        if not isinstance(header, str):
            raise PromptError(
                f"The header of {name.lower()} must be a string, not {type(header).__name__}; "
                "return an empty string for none."
            )
        head = f"{header}\n" if header.strip() else ""

        def encode(text: str) -> list[int]:
            try:
                return self._boundary.encode(f"{head}{text}\n\n", at)
            except PromptError as error:
                raise PromptError(f"{name}: {error}") from error

        ids = encode(passage.text)
        if not ids:
            return []
        if limit is None or len(ids) <= limit:
            return [WindowTokens(tuple(ids), index, 0, 1, 0, len(passage.text))]
        try:
            parts = split(passage.text, encode, limit, len(ids))
        except TooLittleRoomError as error:
            raise LimitError(
                f"{name} has {len(ids)} tokens and can't be cut into windows of "
                f"max_window_tokens={limit}: a window's header and blank line, or one character "
                f"with them, make {error.size} tokens, and an eighth of a window must be left for "
                "text. Raise max_window_tokens, shorten the title, or use header='none'."
            ) from error
        return [
            WindowTokens(part.ids, index, number, len(parts), part.start, part.end)
            for number, part in enumerate(parts)
        ]


def _check_question(conversation: Conversation) -> None:
    """Refuse a user's last message that asks nothing; a tool may well have given nothing back."""
    last = next((turn for turn in reversed(conversation.turns) if turn.role != "system"), None)
    if last is not None and last.role == "user" and not last.content.strip():
        raise PromptError(
            "The question is blank: it holds no text but white space. Ask something; in a "
            "conversation the last message is the question."
        )
