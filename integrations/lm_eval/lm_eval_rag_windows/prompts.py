"""The harness's prompts, split: prefix, few-shot examples as windows, question.

The harness hands over a finished prompt. One that a chat template wrote knows its turns (a
`ChatContext`). In any other the examples have to be found: the harness joins them with a delimiter
(a blank line, for nearly all tasks), but texts may hold that delimiter as well. What is found only
says where the prompt is cut; its text, and its token ids, stay the same wherever that is.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from rag_windows.errors import PromptError
from rag_windows.integration import Boundary, ChatTemplate, Conversation, Piece, alike, leading_ids

Ids = tuple[int, ...]

LEAST_VALUE = 24
"""A document's value that is shorter may stand in an example by chance."""


def find_examples(
    text: str, delimiter: str, *, shots: int | None = None, doc: Mapping[str, Any] | None = None
) -> list[int]:
    """Where the first example starts (a description may stand before) and where each ends.

    Behind the last one stands the question; without examples the list is empty. Delimiters cut the
    text into parts. With ``shots``, parts are counted: if all examples and the question can have
    equally many, that decides. Otherwise

    1. delimiters inside of a long value of the question's own ``doc``, or right behind one, belong
       to the question;
    2. where parts hold a line that begins as the question's last line does ("Answer:"), an example
       ends with such a part, and one part more in the first example is the description; a question
       of one line needs several such parts at equal distances;
    3. else each part is an example.

    A wrong guess groups the text otherwise; it never adds, drops or moves a character.
    """
    found = (match.span() for match in re.finditer(re.escape(delimiter), text))
    every = [end for begin, end in found if text[:begin].strip() and text[end:].strip()]
    if not every or shots == 0:
        return []
    if shots is not None and (counted := _counted(every, shots)):
        return counted
    values = [value.strip() for value in (doc or {}).values() if isinstance(value, str)]
    long = [value for value in values if len(value) >= LEAST_VALUE]
    places = [(at, at + len(value)) for value in long if (at := text.rfind(value)) >= 0]
    ends = list(every)
    while ends:
        at = len(text[: ends[-1] - len(delimiter)].rstrip())
        if not any(begin < at <= end for begin, end in places):
            break
        ends.pop()
    if not ends:
        return []
    lines = [line.strip() for line in text[ends[-1] :].splitlines() if line.strip()]
    closing = [
        end
        for begin, end in itertools.pairwise([0, *ends])
        if any(line.strip().startswith(lines[-1]) for line in text[begin:end].splitlines())
    ]
    counted = _counted(every, len(closing))
    regular = counted[1:] == closing
    if not closing or (len(lines) == 1 and not (regular and len(closing) > 1)):
        # A question of one line may begin an example by chance.
        return [0, *ends]
    return counted if regular else [0, *closing]


def _counted(ends: Sequence[int], shots: int) -> list[int]:
    """The start and the ends of so many examples of equally many parts; empty if they are not."""
    each, more = divmod(len(ends) + 1, shots + 1)
    if not each or more > 1:
        return []
    return [ends[0] if more else 0, *ends[more + each - 1 :: each][:shots]]


_MARK = "\ue000\ue001\ue002"
"""Private-use characters, which survive a template's trimming; no text of a user meets them."""


class ChatContext(str):
    """A prompt written by a chat template, as the string that the harness passes on.

    ``pieces`` are the same text, ``examples`` the turns that are examples, as of `find_examples`;
    where all stands in one user message, they are looked for at its place, ``content``.
    """

    pieces: tuple[Piece, ...] = ()
    examples: Sequence[int] = ()
    content: tuple[int, int] | None = None


def write_chat(
    tokenizer: Any, variables: Mapping[str, Any], history: Sequence[Mapping[str, Any]]
) -> ChatContext:
    """Render a conversation of examples, each ended by the assistant, and the question."""
    if not getattr(tokenizer, "chat_template", None):
        raise PromptError(
            "This model has no chat template. Leave --apply_chat_template out, or use a model "
            "that has one."
        )
    conversation = Conversation.of(list(history))
    _, pieces = ChatTemplate(tokenizer, variables).cut(conversation, slot=False)
    context = ChatContext("".join(piece.text for piece in pieces))
    context.pieces = tuple(pieces)
    said = [("system", conversation.system), *((t.role, t.content) for t in conversation.turns)]
    roles = [role for role, text in said if text]
    lengths = itertools.accumulate((len(piece.text) for piece in pieces), initial=0)
    ends = itertools.pairwise(lengths)
    spans = [span for span, piece in zip(ends, pieces, strict=True) if not piece.trusted]
    if len(spans) == len(roles) and roles.count("user") == 1:
        context.content = spans[roles.index("user")]
    elif len(spans) == len(roles):
        turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": _MARK}]
        rendered = tokenizer.apply_chat_template(turns, tokenize=False, **variables)
        behind_answers = str(rendered).rpartition(_MARK)[2]
        context.examples = _examples(context, list(zip(roles, spans, strict=True)), behind_answers)
    return context


def _examples(
    text: str, said: Sequence[tuple[str, tuple[int, int]]], behind_answers: str
) -> list[int]:
    """Examples end behind what the template writes behind an assistant's message."""
    ends, header = [], ""
    for (role, (_, end)), (then, (begin, _)) in itertools.pairwise(said):
        if (role, then) == ("assistant", "user"):
            between = text[end:begin]
            closing = alike(between, behind_answers)
            header = header or between[closing:]
            ends.append(end + closing)
    if not ends:
        return []
    # The first example begins with the same header as the others, where there is one.
    start = next(begin for role, (begin, _) in said if role == "user")
    return [start - len(header) if text[:start].endswith(header) else start, *ends]


@dataclass(frozen=True, slots=True)
class Cut:
    """A prompt in token ids: joined in this order, they are those of the prompt in one go."""

    prefix: Ids
    windows: tuple[Ids, ...]
    question: Ids

    @property
    def ids(self) -> Ids:
        """All of them, in order."""
        return (*self.prefix, *itertools.chain(*self.windows), *self.question)


def clipped(pieces: Sequence[Piece], start: int, end: int | None = None) -> list[Piece]:
    """The parts of the pieces between two character offsets."""
    found, at = [], 0
    for piece in pieces:
        length = len(piece.text) if end is None else max(0, end - at)
        text = piece.text[max(0, start - at) : length]
        at += len(piece.text)
        if text:
            found.append(Piece(text, piece.trusted))
    return found


class PromptEncoder:
    """Encodes prompts as the harness's own models do, and cuts their ids.

    ``begin_id`` begins prompts that a template writes; ``add_bos_token`` tells whether others begin
    so, None leaves that to the tokenizer.
    """

    def __init__(self, tokenizer: Any, begin_id: int, add_bos_token: bool | None) -> None:
        self.boundary = Boundary(tokenizer)
        self._begin = str(tokenizer.decode([begin_id]))
        self._leading = leading_ids(tokenizer)
        if add_bos_token is not None:
            bos = tokenizer.bos_token_id
            self._leading = (bos,) if add_bos_token and bos is not None else ()
        # A question's choices ask for one cut.
        self.cut = lru_cache(maxsize=8)(self._cut)

    def ids(self, pieces: Sequence[Piece]) -> Ids:
        """A prompt's ids, leading ones included."""
        written = bool(pieces and pieces[0].trusted and self._begin)
        begun = written and pieces[0].text.startswith(self._begin)
        ids = self.boundary.encode_pieces(pieces, "start")
        return (*(() if begun else self._leading), *ids)

    def _cut(self, pieces: tuple[Piece, ...], ends: tuple[int, ...]) -> Cut:
        """Cut a prompt behind the prefix and each window, by ascending character offsets.

        A token that reaches over an end goes to the later part as a whole.
        """
        whole, cuts = self.ids(pieces), [0]
        for end in ends:
            rest = self.boundary.encode_pieces(clipped(pieces, end), "text" if end else "start")
            at = len(whole) - len(rest)
            if whole[at:] != tuple(rest):
                at = alike(self.ids(clipped(pieces, 0, end)), whole)
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
