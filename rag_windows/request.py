"""A question and how it is answered: the options, checked and tokenized before any work."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Protocol, SupportsIndex, runtime_checkable

from rag_windows.errors import InputError, LimitError
from rag_windows.guard import FallbackOption, FallbackPlan
from rag_windows.methods import Method
from rag_windows.methods.base import window_starts
from rag_windows.methods.linked import Choose, LinkTokens
from rag_windows.passage import Passage
from rag_windows.prefill import OnEncoded, Source
from rag_windows.prompt.builder import PromptParts
from rag_windows.prompt.conversation import Conversation
from rag_windows.sampling import LogprobRecorder
from rag_windows.steps.refinement import check_room

Messages = str | Sequence[Mapping[str, Any]] | Conversation
PassageLike = Passage | str | Mapping[str, Any]

DEFAULT_NEW_TOKENS = 128

SINGLE_PASSAGE = "passages must be a list of passages, not a single one; wrap it in []."

DOCUMENT_KEYS = ("document_id", "doc_id", "ref_doc_id", "source")
"""Where metadata name the document that a passage is part of."""

_PART = re.compile(r"(.+)#\d+", re.DOTALL)


@runtime_checkable
class Book(Protocol):
    """What stands in the place of passages and chooses those that a question reads."""

    def chosen(self, model: Any, asked: BatchRequest) -> tuple[Any, BatchRequest]:
        """The engine that answers, and the request with passages in the place of the book.

        Args:
            model: that was asked.
            asked: the request.

        Raises:
            InputError: the book is another model's, or can't serve this request.
        """


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """The arguments of `WindowedLM.generate`, which describes them, as one object.

    Attributes:
        options: what `generate` takes as ``generate_kwargs``.
    """

    query: Messages
    passages: Sequence[PassageLike] | Book = ()
    prefix: str | None = None
    method: str | Method | None = None
    max_new_tokens: int | None = None
    stop: str | Sequence[str] | None = None
    citations: bool = True
    seed: int | None = None
    on_encoded: OnEncoded | None = None
    link_tokens: LinkTokens | None = None
    link_choose: Choose = "first"
    fallback: FallbackOption = None
    options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, request: BatchRequest | Mapping[str, Any]) -> BatchRequest:
        """A request from the keyword arguments of `WindowedLM.generate`.

        Raises:
            InputError: there is no query, or it is no request at all.
        """
        if isinstance(request, BatchRequest):
            return request
        if not isinstance(request, Mapping) or "query" not in request:
            raise InputError(
                "Each request must be a BatchRequest or a dict of generate's arguments with a "
                f"'query', got {type(request).__name__}."
            )
        own = {one.name for one in fields(cls)} - {"options"}
        named = {name: value for name, value in request.items() if name in own}
        options = {name: value for name, value in request.items() if name not in own}
        return cls(**named, options=options)


@dataclass(frozen=True, slots=True)
class Request:
    """A checked request.

    Attributes:
        parts: the prompt, tokenized.
        passages: as they were given.
        method: how the query reads the windows.
        max_new_tokens: at most so many tokens are generated.
        stop: strings before which the text ends.
        citations: whether to record attention weights.
        seed: of a private generator, or None.
        options: for transformers' generate.
        on_encoded: called while passages are encoded, or None.
        started: ``time.perf_counter()`` at the call.
        logprobs: notes log-probabilities of the tokens, or None.
        fallback: a guard and the ordinary way to answer, or None.
    """

    parts: PromptParts
    passages: tuple[Passage, ...]
    method: Method
    max_new_tokens: int
    stop: tuple[str, ...]
    citations: bool
    seed: int | None
    options: Mapping[str, Any]
    on_encoded: OnEncoded | None
    started: float
    logprobs: LogprobRecorder | None = None
    fallback: FallbackPlan[Request] | None = None

    @property
    def sources(self) -> list[Source]:
        """What each window was made from."""
        return [
            Source(
                f"Passage {passage_name(self.passages[window.passage], window.passage)}",
                labels_of(self.passages[window.passage]),
            )
            for window in self.parts.windows
        ]


def in_order(method: Method) -> bool:
    """Whether passages stand one after the other, so that all of them share the positions."""
    return not method.windowed or method.alignment == "in order"


def check_limits(
    parts: PromptParts,
    passages: Sequence[Passage],
    method: Method,
    max_new_tokens: int,
    limit: int | None,
) -> None:
    """Refuse a request whose last token would stand beyond the model's positions.

    With windows side by side the query follows the longest one, so only that one counts; read or
    placed one after the other, all of them do.

    Raises:
        LimitError: naming the passage (or the query) that is too long, its size and the limit.
    """
    if limit is None:
        return
    fixed = len(parts.prefix_ids) + len(parts.query_ids) + max_new_tokens
    if not parts.windows:
        if fixed > limit:
            raise LimitError(
                f"The prompt has {fixed - max_new_tokens} tokens, and with {max_new_tokens} new "
                f"ones it needs {fixed} of the model's {limit} positions. Shorten the question or "
                "the conversation, or ask for fewer new tokens; retrieved text belongs into "
                "passages=, which are read in windows."
            )
        return
    beside = (
        f"{len(parts.prefix_ids)} of the prefix, {len(parts.query_ids)} of the query and "
        f"{max_new_tokens} new ones"
    )
    if fixed >= limit:
        raise LimitError(
            f"{beside} make {fixed} tokens, and the model has {limit} positions: no passage would "
            "fit. Shorten the query or the prefix, or ask for fewer new tokens."
        )
    room = limit - fixed
    used = 0
    side_by_side = not in_order(method)
    for window in parts.windows:
        used = len(window.ids) if side_by_side else used + len(window.ids)
        if used > room:
            name = passage_name(passages[window.passage], window.passage)
            size = f"{len(window.ids)} tokens"
            if side_by_side:
                raise LimitError(
                    f"Passage {name} needs a window of {size}; the model's {limit} positions leave "
                    f"{room} beside {beside}. Set max_window_tokens={room} or less, and it is "
                    "split into several windows."
                )
            raise LimitError(
                f"Read one after the other, the passages pass the model's {limit} positions at "
                f"passage {name} ({size}): {used} tokens where {room} are left beside {beside}. "
                "Give fewer passages, or use a method with windows, such as 'ape' or 'pcw'."
            )
    _check_refinement(parts, passages, method, limit)


def _check_refinement(
    parts: PromptParts, passages: Sequence[Passage], method: Method, limit: int
) -> None:
    """Refuse windows whose further passes would stand beyond the model's positions."""
    refinement = method.refinement
    if refinement is None:
        return
    prefix, lengths = len(parts.prefix_ids), [len(window.ids) for window in parts.windows]
    if not method.windowed:
        check_room(
            refinement,
            [prefix],
            [sum(lengths)],
            limit,
            lambda _: "The one window of all passages",
            "give passages of {} tokens in all",
        )
        return

    def name(index: int) -> str:
        number = parts.windows[index].passage
        return f"A window of passage {passage_name(passages[number], number)}"

    starts = window_starts(method.alignment, prefix, lengths)
    check_room(refinement, starts, lengths, limit, name, "set max_window_tokens={} or less")


def passage_name(passage: Passage, index: int) -> str:
    """How errors and notes call a passage: its number, and its id or title if it has one."""
    label = passage.id or passage.title
    return f"{index}" if label is None else f"{index} ({label!r})"


def labels_of(passage: Passage) -> tuple[str, ...]:
    """Ids by which a cache can be told to forget a passage.

    The passage's own id; its document's, which is an id without the ``#3`` that splitting adds, and
    what the metadata say.
    """
    labels: dict[str, None] = {}
    if passage.id:
        labels[passage.id] = None
        if part := _PART.fullmatch(passage.id):
            labels[part[1]] = None
    for key in DOCUMENT_KEYS:
        value = passage.metadata.get(key)
        if isinstance(value, str) and value:
            labels[value] = None
    return tuple(labels)


def stop_strings(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    """What ends a text, checked."""
    strings = (stop,) if isinstance(stop, str) else () if stop is None else stop
    if not isinstance(strings, Iterable) or not all(isinstance(one, str) for one in strings):
        raise InputError(f"stop must be a string or a list of strings, got {stop!r}.")
    if "" in strings:
        raise InputError("A stop string can't be empty; leave it out.")
    return tuple(strings)


def seed_of(seed: object) -> int | None:
    """What seeds a generator of PyTorch's, or None."""
    if seed is None:
        return None
    number = None if isinstance(seed, bool) or not isinstance(seed, SupportsIndex) else int(seed)
    if number is None or not -(2**63) <= number < 2**64:
        raise InputError(f"seed must be a whole number from -2**63 to 2**64 - 1, got {seed!r}.")
    return number
