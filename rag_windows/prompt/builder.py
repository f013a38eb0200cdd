"""The prompt of a request: prefix, windows and query as token ids."""

from __future__ import annotations

import copy
import functools
import re
from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from rag_windows.errors import LimitError, PromptError
from rag_windows.passage import Note, Passage, WindowTokens
from rag_windows.prompt.conversation import BaseLayout, ChatTemplate, Conversation, strings
from rag_windows.prompt.tokenizing import At, Boundary, Piece

HeaderFunction = Callable[[Passage, int], str | None]
"""Passage and its 1-based number among the passages as given -> header line, or none."""

Header = str | HeaderFunction
"""A name of ``HEADERS``, or a function."""


def _context(passage: Passage) -> str | None:
    """Title, document and place: what a reader of a whole document would know of a chunk."""
    title, document, index = passage.title, passage.document, passage.index
    part = None if index is None else f"part {index + 1}"
    if document is None or document == title:
        where = part if title else None
    else:
        where = f"{part} of document {document}" if part else document
    if title and where:
        return f"{title} ({where})"
    return title or (f"P{where[1:]}" if part and where else where)


HEADERS: Mapping[str, HeaderFunction] = {
    "none": lambda passage, number: None,
    "title": lambda passage, number: passage.title,
    "context": lambda passage, number: _context(passage),
    "number": lambda passage, number: f"[{number}]",
    "number+title": lambda passage, number: (
        f"[{number}] {passage.title}" if passage.title else f"[{number}]"
    ),
}
"""``number`` and ``number+title`` make a window depend on the passage's place among the others."""


@dataclass(frozen=True, slots=True)
class PromptParts:
    """A prompt in token ids: the prefix, the windows in the order of their passages, the query.

    Attributes:
        answer_start: what the chat template wrote behind the last message.
        question: where in the query the text of the last message begins, and where it ends.
        asked: what the user said, of all messages.
    """

    prefix_ids: tuple[int, ...]
    windows: tuple[WindowTokens, ...]
    query_ids: tuple[int, ...]
    notes: tuple[Note, ...]
    answer_start: str = ""
    question: tuple[int, int] | None = None
    asked: str = ""


@dataclass(frozen=True, slots=True)
class _Text:
    """A passage that makes windows: its number and name, the header line, if any, and its text."""

    passage: int
    name: str
    head: str
    text: str

    @property
    def whole(self) -> str:
        """What a window of it holds."""
        return f"{self.head}{self.text}\n\n"


class Prompt:
    """Builds prompts for one tokenizer; safe to use from several threads.

    The tokenizer is read when the prompt is made; tokens added to it later are not seen.
    ``text_tokens`` are special or added tokens that text may produce, where ordinary text is
    spelled with one (a padding token ``!``, words added to the vocabulary).
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        header: Header = "title",
        template_kwargs: Mapping[str, Any] | None = None,
        text_tokens: Collection[str] = (),
    ) -> None:
        if not callable(header) and header not in HEADERS:
            raise PromptError(
                f"Unknown header {header!r}. Use one of {', '.join(HEADERS)}, or a function of "
                "(passage, number) that returns the header line."
            )
        self._header = header if callable(header) else HEADERS[header]
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

    @property
    def clock(self) -> str | None:
        """Why a cache finds windows for a while only: the chat template writes the time."""
        if not isinstance(self._layout, ChatTemplate) or not self._layout.tells_time:
            return None
        return (
            "The chat template may write the time into the prompt (strftime_now). When that "
            "changes, windows that were cached before are not found. Set the template's own "
            "variable for it with template_kwargs (such as date_string), or "
            "tokenizer.chat_template to one without a clock."
        )

    def without_header(self) -> Prompt:
        """The same with windows that hold nothing but their text."""
        other = copy.copy(self)
        other._header = HEADERS["none"]
        return other

    def encode_text(self, text: str, *, continuation: bool = False) -> list[int]:
        """Ids of untrusted text; a `continuation` follows other text."""
        return self._boundary.encode(text, "text" if continuation else "start")

    def build(
        self,
        query: str | Sequence[Mapping[str, Any]] | Conversation,
        passages: Sequence[Passage],
        *,
        prefix: str | None = None,
        max_window_tokens: int | None = None,
        neighbours: int = 0,
    ) -> PromptParts:
        """Tokenize a question, or a conversation (see `Conversation.of`), with its passages.

        Blank and repeated passages make no window and are noted. One that is longer than
        `max_window_tokens` becomes several windows, each with the header, that cover its text
        without gap or overlap. A header that leaves less than an eighth of a window to the text is
        cut to half of one, and noted. `prefix` goes before a leading system message. Each window
        gets the tokens of up to `neighbours` chunks in front of it, as windows of their own would
        have them.
        """
        conversation = Conversation.of(query, prefix)
        # Without an instruction the first window begins the text of a base model.
        at: At = "text" if self.is_chat or conversation.system else "start"
        notes: list[Note] = []
        texts: list[_Text] = []
        nearby: list[list[_Text]] = []
        first: dict[tuple[str, str, tuple[str, ...]], int] = {}
        for index, passage in enumerate(map(Passage.of, passages)):
            name = f"Passage {index}" + (f" (id {passage.id!r})" if passage.id is not None else "")
            if not passage.text.strip():
                notes.append(Note("blank", index, f"{name} has no text and was left out."))
                continue
            before = passage.before[-neighbours:] if neighbours else ()
            same = first.setdefault((passage.title or "", passage.text, before), index)
            if same != index:
                message = f"{name} repeats passage {same} and was left out."
                notes.append(Note("duplicate", index, message, of=same))
                continue
            if neighbours and passage.index and not before:
                message = (
                    f"{name} is chunk {passage.index} of its document, but came without the chunks "
                    "in front of it, so it is encoded alone. with_neighbours() fills them in."
                )
                notes.append(Note("alone", index, message))
            texts.append(self._text(passage, index, name))
            nearby.append([])
            for back, chunk in enumerate(reversed(before), start=1):
                at_ = None if passage.index is None else max(0, passage.index - back)
                chunk_of = replace(passage, text=chunk, index=at_, before=())
                if chunk.strip():
                    nearby[-1].insert(0, self._text(chunk_of, index, f"{name}, chunk before it"))
        windows: list[WindowTokens] = []
        every = dict.fromkeys(text.whole for text in (*texts, *chain.from_iterable(nearby)))
        read = dict(zip(every, self._boundary.encode_plain([*every], at), strict=True))

        @functools.cache
        def windows_of(text: _Text) -> tuple[list[WindowTokens], int]:
            return self._windows(text, read[text.whole], at, max_window_tokens)

        for text, chunks in zip(texts, nearby, strict=True):
            made, cut = windows_of(text)
            if cut:
                message = (
                    f"The header of {text.name[0].lower()}{text.name[1:]} has {cut} tokens, too "
                    f"many for max_window_tokens={max_window_tokens}, and was cut to half of that."
                )
                notes.append(Note("header", text.passage, message))
            if not made:
                message = (
                    f"{text.name} has no text that this tokenizer can encode and was left out."
                )
                notes.append(Note("blank", text.passage, message))
            if len(made) > 1:
                message = (
                    f"{text.name} is longer than max_window_tokens={max_window_tokens} and was "
                    f"split into {len(made)} windows."
                )
                notes.append(Note("split", text.passage, message))
            if neighbours:
                seen = [window.ids for one in chunks for window in windows_of(one)[0]]
                for at_part, window in enumerate(made):
                    earlier = (*seen, *(one.ids for one in made[:at_part]))
                    windows.append(replace(window, before=earlier[-neighbours:]))
            else:
                windows += made
        notes.sort(key=lambda note: note.passage or 0)
        head, tail = self._cut(conversation, windows=bool(windows))
        prefix_ids, query_ids = self._encoded(head, tail, windows=bool(windows))
        # Where the assistant's own message is the last one, the answer has begun already.
        own = not conversation.continued and tail and tail[-1].trusted
        start = tail[-1].text if own else ""
        return PromptParts(
            *(prefix_ids, tuple(windows), query_ids, tuple(notes), start),
            self._question(conversation, tail, len(query_ids)),
            "\n".join(turn.content for turn in conversation.turns if turn.role == "user"),
        )

    def _question(
        self, conversation: Conversation, tail: list[Piece], tokens: int
    ) -> tuple[int, int]:
        """Where the last message's text stands in so many tokens of a query."""
        at = max((at for at, piece in enumerate(tail) if not piece.trusted), default=0)
        if not self.is_chat:
            # Without a template all of it is one text, so the message is where its words are.
            text, said = "".join(piece.text for piece in tail), conversation.turns[-1].content
            place = max(0, text.rfind(said))
            tail, at = [Piece(text[place : place + len(said)]), Piece(text[place + len(said) :])], 0
        own, behind = (len(self._boundary.encode_pieces(tail[i:], "text")) for i in (at, at + 1))
        return max(0, tokens - own), tokens - behind

    def _text(self, passage: Passage, index: int, name: str) -> _Text:
        header = self._header(passage, index + 1)
        return _Text(index, name, f"{header}\n" if header and header.strip() else "", passage.text)

    def around(
        self,
        query: str | Sequence[Mapping[str, Any]] | Conversation,
        *,
        prefix: str | None = None,
        windows: bool = True,
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Ids of the prefix and of the query; without `windows`, everything is in the query."""
        before, after = self._cut(Conversation.of(query, prefix), windows=windows)
        return self._encoded(before, after, windows=windows)

    def _cut(self, conversation: Conversation, *, windows: bool) -> tuple[list[Piece], list[Piece]]:
        last = next((turn for turn in reversed(conversation.turns) if turn.role != "system"), None)
        # A tool may well have given nothing back.
        if last is not None and last.role == "user" and not last.content.strip():
            raise PromptError(
                "The question is blank. Ask something; in a conversation the last message is the "
                "question."
            )
        self._check_tools(conversation.tools)
        return self._layout.cut(conversation, slot=windows)

    def _encoded(
        self, before: list[Piece], after: list[Piece], *, windows: bool
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        leading = tuple(self._layout.leading)
        if not windows:
            return (), (*leading, *self._boundary.encode_pieces(after))
        prefix_ids = (*leading, *self._boundary.encode_pieces(before))
        return prefix_ids, tuple(self._boundary.encode_pieces(after, "text"))

    def _check_tools(self, tools: Sequence[Mapping[str, Any]]) -> None:
        """A template writes tools itself, so their text must hold no control token."""
        for tool in tools:
            for text in strings(tool):
                if found := self._boundary.spelled(text):
                    raise PromptError(
                        f"The definition of tool {tool['function']['name']!r} holds the control "
                        f"token {found!r}. Take it out of its description and parameters."
                    )

    def _windows(
        self, text: _Text, ids: list[int] | None, at: At, limit: int | None
    ) -> tuple[list[WindowTokens], int]:
        """The windows of a text whose ids are known, or None where they are to be read.

        Also the length of its header in tokens, if that is too long and was cut; else 0.
        """

        def encode(part: str) -> list[int]:
            try:
                return self._boundary.encode(replace(text, text=part).whole, at)
            except PromptError as error:
                raise PromptError(f"{text.name}: {error}") from error

        ids = encode(text.text) if ids is None else ids
        if not ids:
            return [], 0
        cut = 0
        if limit is not None and len(ids) > limit:
            around = len(encode(""))
            if limit - around < _least(limit) and text.head:
                text, cut = replace(text, head=self._cut_header(text.head, at, limit // 2)), around
                ids = encode(text.text)
        if limit is None or len(ids) <= limit:
            return [WindowTokens(tuple(ids), text.passage, 0, 1, 0, len(text.text))], cut
        try:
            parts = split(text.text, encode, limit, len(ids))
        except LimitError as error:
            raise LimitError(
                f"{text.name} has {len(ids)} tokens and can't be split into windows of "
                f"max_window_tokens={limit}: {error}"
            ) from error
        windows = [
            WindowTokens(tuple(part), text.passage, number, len(parts), start, end)
            for number, (start, end, part) in enumerate(parts)
        ]
        return windows, cut

    def _cut_header(self, header: str, at: At, limit: int) -> str:
        """The beginning of a header in `limit` tokens with the blank line behind it, or nothing."""

        def cut(length: int) -> str:
            words = header[:length].rstrip()
            if " " in words and not header[length : length + 1].isspace():
                words = words.rpartition(" ")[0]
            return f"{words}…\n"

        def fits(length: int) -> bool:
            return len(self._boundary.encode(f"{cut(length)}\n\n", at)) <= limit

        most = bisect_left(range(1, len(header)), True, key=lambda length: not fits(length))
        return cut(most) if most and fits(most) else ""


_BOUNDARIES = [
    re.compile(pattern)
    for pattern in (r"\n[^\S\n]*\n\s*", r"[.!?…][\"'”’)\]]*\s+|[。！？]", r"\s+")
]
"""Ends of paragraphs, of sentences, and white space."""


def split(
    text: str, encode: Callable[[str], list[int]], limit: int, size: int
) -> list[tuple[int, int, list[int]]]:
    """Cut a text, whose window would have ``size`` tokens, for windows of ``limit`` tokens.

    Parts (start, end, ids with the header) follow each other without a gap or an overlap. A cut
    falls behind the last paragraph that ends in the second half of what fits, else behind the last
    such sentence or white space, else between any two characters. How much fits is guessed from the
    part before, so the work grows with the length of the text and not with its square.
    """
    around = len(encode(""))
    budget = limit - around
    if budget < _least(limit):
        raise _budget_error(around)
    length = max(1, int(len(text) * budget / max(1, size - around)))
    parts: list[tuple[int, int, list[int]]] = []
    start = 0
    while start < len(text):
        end = start + length
        ids = encode(text[start:end])
        while len(ids) > limit:
            if length == 1:
                raise _budget_error(len(ids))
            length = max(1, min(length - 1, int(0.95 * length * budget / (len(ids) - around))))
            end = start + length
            ids = encode(text[start:end])
        density = max(1, len(ids) - around) / len(text[start:end])
        if end < len(text):
            shorter = start + _boundary(text[start:end])
            shorter_ids = encode(text[start:shorter])
            # Fewer characters rarely make more tokens, but they can.
            if len(shorter_ids) <= limit:
                end, ids = shorter, shorter_ids
        parts.append((start, min(end, len(text)), ids))
        start, length = end, max(1, int(budget / density))
    return parts


def _least(limit: int) -> int:
    """Tokens of a window that must be left for text."""
    return max(1, limit // 8)


def _boundary(fitting: str) -> int:
    half = len(fitting) // 2
    for pattern in _BOUNDARIES:
        ends = [match.end() for match in pattern.finditer(fitting, half)]
        if ends:
            return ends[-1]
    return len(fitting)


def _budget_error(size: int) -> LimitError:
    return LimitError(
        f"its header and blank line, or one character with them, make {size} tokens, and an "
        "eighth of a window must be left for text. Raise max_window_tokens, shorten the title, "
        "or use header='none'."
    )
