"""The harness's prompts, taken apart: prefix, few-shot examples as windows, question.

The harness hands over a finished prompt. One that a chat template wrote knows its turns (a
`ChatContext`). In any other the examples have to be found: the harness joins them with a delimiter
(a blank line, for nearly all tasks), but texts may hold that delimiter as well. What is found only
says where the prompt is cut; its text, and its token ids, stay the same wherever that is.
"""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from jinja2.exceptions import TemplateError

from rag_windows import WindowedLM
from rag_windows.errors import InputError, LimitError, PromptError
from rag_windows.integration import (
    Boundary,
    ChatTemplate,
    Conversation,
    Piece,
    check_room,
    leading_ids,
    window_starts,
)

Ids = tuple[int, ...]

_log = logging.getLogger(__name__)

LEAST_VALUE = 24
"""A document's value that is shorter may stand in an example by chance."""

NEIGHBOURHOOD = 16
"""Characters on each side of a delimiter by which it is found in a document's values."""


@dataclass(frozen=True, slots=True)
class Borders:
    """Character offsets into a prompt.

    Attributes:
        start: where the examples begin; before it stands a description of the task, or nothing.
        ends: where each example ends, its delimiter included. The question follows the last one.
            Empty where there are no examples; then all of the prompt is the question.
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

    Args:
        text: the prompt.
        delimiter: what the task puts behind an example.
        shots: how many examples there are; None if that is not known.
        doc: the document that the question was made of.
    """
    ends = list(_ends(text, delimiter))
    if not ends or shots == 0:
        return Borders()
    if shots is not None and (counted := _counted(ends, shots)) is not None:
        return counted
    values = [value for value in _strings(doc) if len(value.strip()) >= LEAST_VALUE]
    own = 0
    while ends and _belongs(text, ends[-1], delimiter, values):
        ends.pop()
        own += 1
    if not ends:
        return Borders()
    lines = [line.strip() for line in text[ends[-1] :].splitlines() if line.strip()]
    parts = [text[a:b] for a, b in zip([0, *ends], ends, strict=False)]
    closing = [i for i, part in enumerate(parts) if _has_line(part, lines[-1])]
    if not closing:
        return Borders(0, tuple(ends))
    own += len(parts) - closing[-1]
    sizes = [b - a for a, b in zip([-1, *closing], closing, strict=False)]
    usual = Counter(sizes[1:]).most_common(1)[0][0] if len(sizes) > 1 else own
    alike = set(sizes[1:]) <= {usual}
    described = alike and sizes[0] == usual + 1
    if len(lines) == 1:
        # All of the question, which an example may begin with by chance.
        regular = alike and usual == own and sizes[0] - described == usual
        if len(sizes) == 1 or not regular:
            return Borders(0, tuple(ends))
    return Borders(ends[0] if described else 0, tuple(ends[i] for i in closing))


def _ends(text: str, delimiter: str) -> Iterator[int]:
    """Ends of the delimiters that have something on both sides."""
    at = text.find(delimiter) if delimiter else -1
    while at >= 0:
        end = at + len(delimiter)
        if text[:at].strip() and text[end:].strip():
            yield end
        at = text.find(delimiter, end)


def _counted(ends: Sequence[int], shots: int) -> Borders | None:
    """Examples of equally many parts, if that is what the number of parts says."""
    each, more = divmod(len(ends) + 1, shots + 1)
    if each == 0 or more > 1:
        return None
    start = ends[0] if more else 0
    return Borders(start, tuple(ends[more + each * (i + 1) - 1] for i in range(shots)))


def _belongs(text: str, end: int, delimiter: str, values: Sequence[str]) -> bool:
    """Whether a delimiter lies in one of the values, or right behind one."""
    start = end - len(delimiter)
    around = text[max(0, start - NEIGHBOURHOOD) : end + NEIGHBOURHOOD].strip()
    before = text[:start].rstrip()
    return any(around in value or before.endswith(value.strip()) for value in values)


def _has_line(part: str, cue: str) -> bool:
    return any(line.strip().startswith(cue) for line in part.splitlines())


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for entry in value.values():
            yield from _strings(entry)
    elif isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        for entry in value:
            yield from _strings(entry)


# Prompts of chat templates

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
        boundary: of the tokenizer.
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
        self._template = ChatTemplate(tokenizer, kwargs)
        self._controls = boundary.controls
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
        """Render a conversation whose last user turn is the question.

        Args:
            history: ``{"role": ..., "content": ...}`` each; turns that an assistant's message ends
                are examples.
            answered: whether the last message is how the assistant's answer begins.

        Raises:
            PromptError: the template refuses the conversation, or can't be followed.
        """
        ends_with_answer = bool(history) and history[-1].get("role") == "assistant"
        if answered and not ends_with_answer:
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
        spans, at = [], 0
        for piece in pieces:
            if not piece.trusted:
                spans.append((at, at + len(piece.text)))
            at += len(piece.text)
        if len(spans) == len(roles):
            asked = [span for span, role in zip(spans, roles, strict=True) if role == "user"]
            if len(asked) == 1:
                context.content = asked[0]
            else:
                context.borders = self._borders(context, roles, spans)
        return context

    def _borders(
        self, text: str, roles: Sequence[str], spans: Sequence[tuple[int, int]]
    ) -> Borders:
        """Examples end behind what the template writes behind an assistant's message."""
        ends, header = [], ""
        for index in range(len(roles) - 1):
            if (roles[index], roles[index + 1]) == ("assistant", "user"):
                between = text[spans[index][1] : spans[index + 1][0]]
                closing = common_length(between, self._behind_answers)
                for found in self._controls.spelled.finditer(between):
                    if found.start() < closing < found.end():
                        closing = found.start()  # no control token is cut
                header = header or between[closing:]
                ends.append(spans[index][1] + closing)
        if not ends:
            return Borders()
        start = spans[roles.index("user")][0]
        # The first example begins with the same header as the others, where there is one.
        return Borders(start - len(header) if text[:start].endswith(header) else start, tuple(ends))


# Token ids


@dataclass(frozen=True, slots=True)
class Cut:
    """A prompt in token ids: joined in this order, they are those of the prompt in one go.

    Attributes:
        prefix: what all windows see.
        windows: none of them empty.
        question: the rest.
    """

    prefix: Ids
    windows: tuple[Ids, ...]
    question: Ids


class Cutter:
    """Encodes prompts as the harness's own models do, and cuts the ids.

    Args:
        tokenizer: of the model.
        boundary: made of it.
        add_bos_token: whether a prompt begins with the beginning-of-sequence token; None asks the
            tokenizer.
        bos: text of the token which, where a template wrote it, is not put before it once more.
    """

    def __init__(
        self, tokenizer: Any, boundary: Boundary, *, add_bos_token: bool | None, bos: str
    ) -> None:
        self._boundary = boundary
        self._bos = bos
        if add_bos_token is None:
            self._leading: Ids = leading_ids(tokenizer)
        else:
            bos_id = tokenizer.bos_token_id if add_bos_token else None
            self._leading = () if bos_id is None else (bos_id,)
        # The same examples come back in many prompts, and a question's choices ask for one cut.
        self._encode = lru_cache(maxsize=4096)(self._encode_new)
        self.cut = lru_cache(maxsize=8)(self._cut)

    def ids(self, pieces: Sequence[Piece]) -> Ids:
        """A prompt's ids, leading ones included."""
        return (*self._before(pieces), *self._encode_new(tuple(pieces), "start"))

    def text(self, text: str, *, leading: bool = True) -> Ids:
        """Ids of a text as a prompt, with or without leading ones."""
        pieces = (Piece(text),)
        return self.ids(pieces) if leading else self._encode_new(pieces, "start")

    def _before(self, pieces: Sequence[Piece]) -> Ids:
        written = bool(pieces) and pieces[0].trusted and bool(self._bos)
        return () if written and pieces[0].text.startswith(self._bos) else self._leading

    def _cut(self, pieces: tuple[Piece, ...], ends: tuple[int, ...]) -> Cut:
        """Cut a prompt; a token that reaches over an end goes to the later part as a whole.

        Args:
            pieces: the prompt.
            ends: character offsets: of the prefix, then of each window; ascending.
        """
        whole = self.ids(pieces)
        parts = self._parts(pieces, ends)
        if [token for part in parts for token in part] != list(whole):
            parts = self._out_of(whole, pieces, ends)
        prefix, *windows = parts[:-1]
        question = parts[-1]
        windows = [ids for ids in windows if ids]
        # There has to be a token that something is predicted from.
        if not question and windows:
            question = windows.pop()
        elif not question:
            prefix, question = (), prefix
        return Cut(prefix, tuple(windows), question)

    def _parts(self, pieces: Sequence[Piece], ends: Sequence[int]) -> list[Ids]:
        """Each part for itself, but in sight of the next one's first character.

        Mostly that is what a tokenizer makes of the whole. Many write two line breaks as one token
        at the end of a text, and as two before a letter; hence the character.
        """
        texts = list(_between(pieces, ends))
        parts: list[Ids] = []
        for number, part in enumerate(texts):
            at = "text" if number and ends[number - 1] else "start"
            ids = self._encode(tuple(part), at)
            follower = next((piece for later in texts[number + 1 :] for piece in later), None)
            if part and follower is not None:
                first = (Piece(follower.text[0], follower.trusted),)
                seen, alone = self._encode((*part, *first), at), self._encode(first, "text")
                ids = seen[: -len(alone)] if alone and seen[-len(alone) :] == alone else ids
            parts.append((*self._before(pieces), *ids) if number == 0 else ids)
        return parts

    def _out_of(self, whole: Ids, pieces: Sequence[Piece], ends: Sequence[int]) -> list[Ids]:
        """The whole, cut where the ids of its beginning, or of its rest, agree with it."""
        cuts = [0]
        for end in ends:
            beginning, rest = _between(pieces, [end])
            before = (*self._before(pieces), *self._encode(tuple(beginning), "start"))
            at = common_length(before, whole)
            if at < len(before):
                behind = self._encode(tuple(rest), "text" if end else "start")
                if behind and whole[-len(behind) :] == behind:
                    at = len(whole) - len(behind)
            cuts.append(max(cuts[-1], at))
        cuts.append(len(whole))
        return [whole[a:b] for a, b in itertools.pairwise(cuts)]

    def _encode_new(self, pieces: tuple[Piece, ...], at: Any) -> Ids:
        return tuple(self._boundary.encode_pieces(pieces, at))


def _between(pieces: Sequence[Piece], ends: Sequence[int]) -> Iterator[list[Piece]]:
    """The pieces of each part, the last one being what follows all ends."""
    start = 0
    length = sum(len(piece.text) for piece in pieces)
    for end in (*ends, length):
        yield list(_clipped(pieces, start, end))
        start = end


def _clipped(pieces: Sequence[Piece], start: int, end: int) -> Iterator[Piece]:
    """What of the pieces lies between two character offsets."""
    at = 0
    for piece in pieces:
        text = piece.text[max(0, start - at) : max(0, end - at)]
        at += len(piece.text)
        if text:
            yield Piece(text, piece.trusted)


def common_length(first: Sequence[Any], second: Sequence[Any]) -> int:
    """How far two sequences agree from their beginning."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))


# Requests


@dataclass(frozen=True, slots=True, kw_only=True)
class Examples:
    """How examples are found in a prompt, and how windows are made of them.

    Attributes:
        delimiter: what tasks put behind an example.
        shots: how many examples a prompt has; None if that is not known, 0 for none.
        each: examples a window; None for one.
        windows: or how many windows they are spread over.
        before: text that is put before every prompt, followed by the delimiter.

    Raises:
        InputError: values that make no sense, or no sense together.
    """

    delimiter: str = "\n\n"
    shots: int | None = None
    each: int | None = None
    windows: int | None = None
    before: str = ""

    def __post_init__(self) -> None:
        check_count("num_fewshot", self.shots, 0)
        check_count("examples_per_window", self.each)
        check_count("windows", self.windows)
        if self.each is not None and self.windows is not None:
            raise InputError(
                "examples_per_window and windows can't both be given; leave one of them out."
            )
        if not isinstance(self.delimiter, str) or not self.delimiter:
            raise InputError(f"fewshot_delimiter must be a text, got {self.delimiter!r}.")

    def window_ends(self, examples: Sequence[int]) -> list[int]:
        """Ends of windows, out of the ends of examples: whole examples, in their order.

        ``windows`` spreads them as evenly as whole examples allow; with fewer examples there are
        fewer windows.
        """
        count = len(examples)
        if self.windows is None:
            each = self.each or 1
            return [examples[min(i + each, count) - 1] for i in range(0, count, each)]
        windows = min(self.windows, count)
        return [examples[count * (i + 1) // windows - 1] for i in range(windows)]


def check_count(name: str, value: object, least: int = 1) -> None:
    """Refuse what is neither None nor a whole number.

    Raises:
        InputError: naming it.
    """
    whole = isinstance(value, int) and not isinstance(value, bool) and value >= least
    if value is not None and not whole:
        raise InputError(f"{name} must be a whole number from {least} on, got {value!r}.")


class Prompts:
    """Takes a run's prompts apart, and makes them fit the model's positions.

    A window that is longer than it may be becomes several. What is too long then, loses tokens from
    its left end, as with the harness's own models: the question where there are windows, the whole
    prompt where there are none or they are read one after the other. Each time a warning is logged.

    Args:
        lm: the model, with a tokenizer.
        examples: how examples are found.
        boundary: turns texts into ids.
        cutter: of the tokenizer.
        max_length: positions that may be used.
        max_window_tokens: tokens that a window may hold.

    Attributes:
        wrote_chats: whether prompts come from a chat template; set by whoever applies one.
        split: windows that were cut into several.
        truncated: prompts that lost tokens.
    """

    def __init__(
        self,
        lm: WindowedLM,
        examples: Examples,
        boundary: Boundary,
        cutter: Cutter,
        max_length: int,
        max_window_tokens: int,
    ) -> None:
        self._method = lm.method
        self._examples = examples
        self._spelled = boundary.controls.spelled
        self._cutter = cutter
        self._limit = max_length
        self._window = max_window_tokens
        self._told = False
        self.wrote_chats = False
        self.split = 0
        self.truncated = 0

    def cut(self, context: str, doc: Any = None) -> Cut:
        """Token ids of a prompt without a continuation.

        Args:
            context: the prompt.
            doc: the document that its question was made of.

        Raises:
            PromptError: text that can't be encoded safely.
        """
        return self._cutter.cut(*self._read(context, doc))

    def pair(self, context: str, continuation: str, doc: Any = None) -> tuple[Cut, Ids]:
        """Token ids of a prompt and of what follows it.

        White space at the end of the prompt counts to what follows, and the two are encoded
        together, as the harness's own models do.

        Raises:
            PromptError: text that can't be encoded safely.
        """
        kept = len(context.rstrip())
        pieces, ends = self._read(context, doc, kept)
        whole = self._cutter.ids([*pieces, Piece(context[kept:] + continuation)])
        cut = self._cutter.cut(pieces, ends)
        length = len(cut.prefix) + sum(map(len, cut.windows)) + len(cut.question)
        return cut, whole[length:]

    def fit(self, cut: Cut, more: int, name: str) -> Cut:
        """A prompt that leaves room for ``more`` tokens.

        Raises:
            LimitError: there is no way; the message names the request.
        """
        windows: list[Ids] = []
        one_after_another = not self._method.windowed or self._method.alignment == "in order"
        for ids in cut.windows:
            size = len(ids) if one_after_another else self._window
            parts = [ids[i : i + size] for i in range(0, len(ids), size)]
            self.split += len(parts) > 1
            windows += parts
        used = sum(map(len, windows)) if one_after_another else max(map(len, windows), default=0)
        over = len(cut.prefix) + used + len(cut.question) + more - self._limit
        cut = Cut(cut.prefix, tuple(windows), cut.question)
        if over > 0:
            cut = self._truncated(cut, over, more, name)
        self._check_refinement(cut, name)
        return cut

    def _truncated(self, cut: Cut, over: int, more: int, name: str) -> Cut:
        whole = not cut.windows or not self._method.windowed
        ids = cut.question
        if whole:
            ids = (*cut.prefix, *(i for window in cut.windows for i in window), *cut.question)
        if over >= len(ids):
            raise LimitError(
                f"{name} does not fit the {self._limit} positions that may be used: {over} tokens "
                f"too many, with {len(cut.question)} of the question and {more} behind it. Set "
                "max_window_tokens lower, give fewer examples, or raise max_length if the model "
                "can."
            )
        self.truncated += 1
        _log.warning(
            "%s is longer than %d positions; it loses %d tokens from the left of %s.",
            name,
            self._limit,
            over,
            "the prompt" if whole else "its question",
        )
        return Cut((), (), ids[over:]) if whole else Cut(cut.prefix, cut.windows, ids[over:])

    def _check_refinement(self, cut: Cut, name: str) -> None:
        """Refuse windows whose further passes would stand beyond the model's positions."""
        refinement = self._method.refinement
        if refinement is None or not cut.windows:
            return
        prefix, lengths = len(cut.prefix), [len(ids) for ids in cut.windows]
        starts = window_starts(self._method.alignment, prefix, lengths)
        if not self._method.windowed:
            starts, lengths = [prefix], [sum(lengths)]
        check_room(
            refinement,
            starts,
            lengths,
            self._limit,
            lambda index: f"Window {index} of {name}",
            "set max_window_tokens={} or less",
        )

    def _read(
        self, context: str, doc: Any, kept: int | None = None
    ) -> tuple[tuple[Piece, ...], tuple[int, ...]]:
        """The prompt's pieces, up to ``kept`` characters, and the ends of prefix and windows."""
        pieces, borders = self._pieces(context, doc)
        length = len(context) if kept is None else kept
        ends = [borders.start, *self._examples.window_ends(borders.ends)]
        if self._examples.before and not isinstance(context, ChatContext):
            before = self._examples.before + self._examples.delimiter
            pieces, length = (Piece(before), *pieces), length + len(before)
            ends = [end + len(before) for end in ends]
        return tuple(_clipped(pieces, 0, length)), tuple(min(end, length) for end in ends)

    def _pieces(self, context: str, doc: Any) -> tuple[tuple[Piece, ...], Borders]:
        delimiter, shots = self._examples.delimiter, self._examples.shots
        if isinstance(context, ChatContext):
            if context.borders is not None or context.content is None:
                return context.pieces, context.borders or Borders()
            start, end = context.content
            found = find_borders(context[start:end], delimiter, shots=shots, doc=doc)
            ends = tuple(start + end for end in found.ends)
            return context.pieces, Borders(start + found.start if ends else 0, ends)
        if self.wrote_chats and self._spelled.search(context):
            # The task made a plain string of it, so which texts are the template's is lost.
            if not self._told:
                self._told = True
                _log.warning(
                    "A task changes the prompts that the chat template wrote. They are read "
                    "without windows, and all control tokens in them count as the template's."
                )
            return (Piece(context, trusted=True),), Borders()
        return (Piece(context),), find_borders(context, delimiter, shots=shots, doc=doc)
