"""The harness's prompts, taken apart: prefix, few-shot examples as windows, question.

The harness hands over a finished prompt. One that a chat template wrote knows its turns (a
`ChatContext`). In any other the examples have to be found: the harness joins them with a delimiter
(a blank line, for nearly all tasks), but texts may hold that delimiter as well. What is found only
says where the prompt is cut; its text, and its token ids, stay the same wherever that is.
"""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

from jinja2.exceptions import TemplateError

from rag_windows import WindowedLM
from rag_windows.errors import LimitError, PromptError
from rag_windows.integration import (
    Boundary,
    ChatTemplate,
    Conversation,
    Piece,
    leading_ids,
)

Ids = tuple[int, ...]

_log = logging.getLogger(__name__)

LEAST_VALUE = 24
"""A document's value that is shorter may stand in an example by chance."""

NEIGHBOURHOOD = 16
"""Characters on each side of a delimiter by which it is found in a document's values."""


@dataclass(frozen=True, slots=True)
class Borders:
    """Where examples start (a description may stand before) and each ends, in characters.

    Behind the last one stands the question.
    """

    start: int = 0
    ends: tuple[int, ...] = ()


def find_borders(
    text: str, delimiter: str, *, shots: int | None = None, doc: Any = None
) -> Borders:
    """Tell a description, examples and the question apart.

    With ``shots`` the delimiters are counted: if every example and the question have equally many
    parts, with or without one more for the description, that is it. Otherwise, or without
    ``shots``:

    1. A delimiter that lies in a long value of the question's own document, or ends one, belongs
       to the question, as do all parts behind it.
    2. If other parts have a line that begins like the question's last line ("Answer:"), then an
       example ends with such a part. One part more in the first example than in all others is the
       description. A question of one line needs several such parts at equal distances.
    3. Otherwise each part is an example.
    """
    found = (match.span() for match in re.finditer(re.escape(delimiter), text))
    ends = [end for begin, end in found if text[:begin].strip() and text[end:].strip()]
    if not ends or shots == 0:
        return Borders()
    if shots is not None:
        each, more = divmod(len(ends) + 1, shots + 1)
        if each and more <= 1:
            start = ends[0] if more else 0
            return Borders(start, tuple(ends[more + each - 1 :: each][:shots]))
    values = [value for value in _strings(doc) if len(value.strip()) >= LEAST_VALUE]
    own = len(ends)
    while ends and _in_values(text, ends[-1] - len(delimiter), ends[-1], values):
        ends.pop()
    if not ends:
        return Borders()
    lines = [line.strip() for line in text[ends[-1] :].splitlines() if line.strip()]
    parts = [text[a:b] for a, b in itertools.pairwise([0, *ends])]
    closing = [
        number
        for number, part in enumerate(parts)
        if any(line.strip().startswith(lines[-1]) for line in part.splitlines())
    ]
    if not closing:
        return Borders(0, tuple(ends))
    own -= closing[-1]
    sizes = [b - a for a, b in itertools.pairwise([-1, *closing])]
    usual = sizes[1] if len(sizes) > 1 else own
    alike = set(sizes[1:]) <= {usual}
    described = alike and sizes[0] == usual + 1
    regular = len(sizes) > 1 and alike and usual == own and sizes[0] - described == usual
    if len(lines) == 1 and not regular:
        # All of the question, which an example may begin with by chance.
        return Borders(0, tuple(ends))
    return Borders(ends[0] if described else 0, tuple(ends[i] for i in closing))


def _in_values(text: str, start: int, end: int, values: Sequence[str]) -> bool:
    """Whether a delimiter lies in one of the values, or right behind one."""
    around = text[max(0, start - NEIGHBOURHOOD) : end + NEIGHBOURHOOD].strip()
    before = text[:start].rstrip()
    return any(around in value or before.endswith(value.strip()) for value in values)


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for entry in value.values() if isinstance(value, Mapping) else value:
            yield from _strings(entry)


_MARK = "\ue000\ue001\ue002"
"""Private-use characters, which survive a template's trimming; no text of a user meets them."""


class ChatContext(str):
    """A prompt written by a chat template, as the string that the harness passes on.

    ``pieces`` are the same text, ``borders`` the turns that are examples; where all stands in one
    user message, ``content`` is its place instead. ``strip`` or ``+`` makes a plain string of it.
    """

    pieces: tuple[Piece, ...] = ()
    borders: Borders | None = None
    content: tuple[int, int] | None = None

    def __getnewargs__(self) -> tuple[str]:
        # The harness keeps requests in pickles of its own, if asked to.
        return (str(self),)


class ChatWriter:
    """Writes conversations with examples by a tokenizer's chat template."""

    def __init__(self, tokenizer: Any, kwargs: Mapping[str, Any]) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise PromptError(
                "This model has no chat template: leave --apply_chat_template out, or use a model "
                "that has one."
            )
        self._template = ChatTemplate(tokenizer, kwargs)
        turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": _MARK}]
        try:
            text = str(
                tokenizer.apply_chat_template(
                    turns, tokenize=False, add_generation_prompt=False, **kwargs
                )
            )
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError):
            text = ""  # then examples are cut right behind the answer
        self._behind_answers = text.rpartition(_MARK)[2] if _MARK in text else ""

    def write(self, history: Sequence[Mapping[str, Any]], *, answered: bool = False) -> ChatContext:
        """Render a conversation of examples, each ended by the assistant, and the question.

        ``answered``: the last message is how the assistant's answer begins.
        """
        if answered and (not history or history[-1].get("role") != "assistant"):
            raise PromptError(
                "Without a generation prompt, the last message must be the assistant's: how its "
                "answer begins."
            )
        conversation = Conversation.of(list(history))
        _, pieces = self._template.cut(conversation, slot=False)
        context = ChatContext("".join(piece.text for piece in pieces))
        context.pieces = tuple(pieces)
        said = [("system", conversation.system), *((t.role, t.content) for t in conversation.turns)]
        roles = [role for role, text in said if text]
        lengths = itertools.accumulate((len(piece.text) for piece in pieces), initial=0)
        ends = itertools.pairwise(lengths)
        spans = [span for span, piece in zip(ends, pieces, strict=True) if not piece.trusted]
        if len(spans) == len(roles):
            if roles.count("user") == 1:
                context.content = spans[roles.index("user")]
            else:
                context.borders = self._borders(context, roles, spans)
        return context

    def _borders(
        self, text: str, roles: Sequence[str], spans: Sequence[tuple[int, int]]
    ) -> Borders:
        """Examples end behind what the template writes behind an assistant's message."""
        ends, header = [], ""
        for (role, (_, end)), (then, (begin, _)) in itertools.pairwise(
            zip(roles, spans, strict=True)
        ):
            if (role, then) == ("assistant", "user"):
                between = text[end:begin]
                closing = common_length(between, self._behind_answers)
                header = header or between[closing:]
                ends.append(end + closing)
        if not ends:
            return Borders()
        start = spans[roles.index("user")][0]
        # The first example begins with the same header as the others, where there is one.
        return Borders(start - len(header) if text[:start].endswith(header) else start, tuple(ends))


@dataclass(frozen=True, slots=True)
class Cut:
    """A prompt in token ids: joined in this order, they are those of the prompt in one go."""

    prefix: Ids
    windows: tuple[Ids, ...]
    question: Ids


def clipped(pieces: Sequence[Piece], start: int, end: int | None = None) -> list[Piece]:
    """What of the pieces lies between two character offsets."""
    kept, at = [], 0
    for piece in pieces:
        length = len(piece.text) if end is None else max(0, end - at)
        text = piece.text[max(0, start - at) : length]
        at += len(piece.text)
        if text:
            kept.append(Piece(text, piece.trusted))
    return kept


def common_length(first: Sequence[Any], second: Sequence[Any]) -> int:
    """How far two sequences agree from their beginning."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))


@dataclass(kw_only=True, eq=False)
class Prompts:
    """Encodes a run's prompts as the harness's own models do, cuts their ids, and makes them fit.

    A window that is longer than it may be becomes several. What is too long then, loses tokens from
    its left end: the question where there are windows, the whole prompt where there are none or
    they are read one after the other. Each time a warning is logged.

    Options are arguments of `RagWindowsLM`; ``bos`` is the text of what begins a prompt, unless a
    template wrote it already. Counted are windows that were ``split`` and prompts ``truncated``.
    """

    lm: WindowedLM
    boundary: Boundary
    bos: str
    add_bos_token: bool | None
    delimiter: str
    shots: int | None
    each: int
    windows: int | None
    before: str
    max_length: int
    max_window_tokens: int
    wrote_chats: bool = False
    split: int = 0
    truncated: int = 0

    def __post_init__(self) -> None:
        bos_id = cast(Any, self.lm.tokenizer).bos_token_id
        self._leading: Ids = () if bos_id is None or not self.add_bos_token else (bos_id,)
        if self.add_bos_token is None:
            self._leading = leading_ids(self.lm.tokenizer)
        # A question's choices ask for one cut.
        self.cut_at = lru_cache(maxsize=8)(self._cut_at)
        self._told = False

    def ids(self, pieces: Sequence[Piece]) -> Ids:
        """A prompt's ids, leading ones included."""
        written = bool(pieces and pieces[0].trusted and self.bos)
        begun = written and pieces[0].text.startswith(self.bos)
        ids = self.boundary.encode_pieces(pieces, "start")
        return (*(() if begun else self._leading), *ids)

    def text(self, text: str, *, leading: bool = True) -> Ids:
        """Ids of a text as a prompt, with or without leading ones."""
        return self.ids([Piece(text)]) if leading else tuple(self.boundary.encode(text))

    def _cut_at(self, pieces: tuple[Piece, ...], ends: tuple[int, ...]) -> Cut:
        """Cut a prompt behind the prefix and each window, by ascending character offsets.

        A token that reaches over an end goes to the later part as a whole.
        """
        whole, cuts = self.ids(pieces), [0]
        for end in ends:
            rest = self.boundary.encode_pieces(clipped(pieces, end), "text" if end else "start")
            at = len(whole) - len(rest)
            if whole[at:] != tuple(rest):
                at = common_length(self.ids(clipped(pieces, 0, end)), whole)
            cuts.append(max(cuts[-1], at))
        parts = [whole[a:b] for a, b in itertools.pairwise([*cuts, len(whole)])]
        prefix, question = parts[0], parts[-1]
        windows = [ids for ids in parts[1:-1] if ids]
        # There has to be a token that something is predicted from.
        if not question and windows:
            question = windows.pop()
        elif not question:
            prefix, question = (), prefix
        return Cut(prefix, tuple(windows), question)

    def cut(self, context: str, doc: Any = None) -> Cut:
        """Token ids of a prompt alone; ``doc`` is what its question was made of."""
        return self.cut_at(*self._read(context, doc, len(context)))

    def pair(self, context: str, continuation: str, doc: Any = None) -> tuple[Cut, Ids]:
        """Token ids of a prompt and of what follows it.

        White space at the end of the prompt counts to what follows, and the two are encoded
        together, as the harness's own models do.
        """
        kept = len(context.rstrip())
        pieces, ends = self._read(context, doc, kept)
        whole = self.ids([*pieces, Piece(context[kept:] + continuation)])
        cut = self.cut_at(pieces, ends)
        length = len(cut.prefix) + sum(map(len, cut.windows)) + len(cut.question)
        return cut, whole[length:]

    def fit(self, cut: Cut, more: int, name: str) -> Cut:
        """A prompt that leaves room for ``more`` tokens, or a LimitError that names the request."""
        windows: list[Ids] = []
        in_order = not self.lm.method.windowed or self.lm.method.alignment == "in order"
        for ids in cut.windows:
            size = len(ids) if in_order else self.max_window_tokens
            parts = [ids[i : i + size] for i in range(0, len(ids), size)]
            self.split += len(parts) > 1
            windows += parts
        used = sum(map(len, windows)) if in_order else max(map(len, windows), default=0)
        over = len(cut.prefix) + used + len(cut.question) + more - self.max_length
        if over <= 0:
            return Cut(cut.prefix, tuple(windows), cut.question)
        whole = not windows or not self.lm.method.windowed
        ids = tuple(itertools.chain(cut.prefix, *windows, cut.question)) if whole else cut.question
        if over >= len(ids):
            raise LimitError(
                f"{name} does not fit the {self.max_length} positions to be used: {over} tokens "
                f"too many, with {len(cut.question)} of the question and {more} behind it. Set "
                "max_window_tokens lower, give fewer examples, or raise max_length if the model "
                "can."
            )
        self.truncated += 1
        _log.warning(
            "%s is longer than %d positions; it loses %d tokens from the left of %s.",
            name,
            self.max_length,
            over,
            "the prompt" if whole else "its question",
        )
        return Cut((), (), ids[over:]) if whole else Cut(cut.prefix, tuple(windows), ids[over:])

    def _read(self, context: str, doc: Any, kept: int) -> tuple[tuple[Piece, ...], tuple[int, ...]]:
        """The prompt's pieces, up to ``kept`` characters, and the ends of prefix and windows."""
        pieces, borders = self._pieces(context, doc)
        ends = [borders.start, *self._window_ends(borders.ends)]
        if self.before and not isinstance(context, ChatContext):
            before = self.before + self.delimiter
            pieces, kept = (Piece(before), *pieces), kept + len(before)
            ends = [end + len(before) for end in ends]
        return tuple(clipped(pieces, 0, kept)), tuple(min(end, kept) for end in ends)

    def _window_ends(self, examples: Sequence[int]) -> list[int]:
        """Ends of windows out of the ends of examples, which are spread as evenly as can be."""
        count = len(examples)
        if self.windows is None:
            return [examples[min(i + self.each, count) - 1] for i in range(0, count, self.each)]
        windows = min(self.windows, count)
        return [examples[count * (i + 1) // windows - 1] for i in range(windows)]

    def _pieces(self, context: str, doc: Any) -> tuple[tuple[Piece, ...], Borders]:
        delimiter, shots = self.delimiter, self.shots
        if isinstance(context, ChatContext):
            if context.borders is not None or context.content is None:
                return context.pieces, context.borders or Borders()
            start, end = context.content
            found = find_borders(context[start:end], delimiter, shots=shots, doc=doc)
            ends = tuple(start + end for end in found.ends)
            return context.pieces, Borders(start + found.start if ends else 0, ends)
        if self.wrote_chats and self.boundary.spelled(context):
            # The task made a plain string of it, so which texts are the template's is lost.
            if not self._told:
                self._told = True
                _log.warning(
                    "A task changes the prompts that the chat template wrote. They are read "
                    "without windows, and all control tokens in them count as the template's."
                )
            return (Piece(context, trusted=True),), Borders()
        return (Piece(context),), find_borders(context, delimiter, shots=shots, doc=doc)
