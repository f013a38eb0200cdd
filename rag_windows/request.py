"""A question with its passages, checked and tokenized before any work."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, SupportsIndex, cast

from rag_windows.errors import InputError, LimitError
from rag_windows.generate import check_counts, whole_number
from rag_windows.guard import FallbackPlan, Guard
from rag_windows.methods import Method
from rag_windows.methods.base import window_starts
from rag_windows.methods.steps import Refinement
from rag_windows.passage import Passage
from rag_windows.prefill import OnEncoded, Source
from rag_windows.prompt.builder import Prompt, PromptParts
from rag_windows.prompt.conversation import Conversation
from rag_windows.results import LogprobRecorder, recorder_of
from rag_windows.steps.refinement import check_room

DOCUMENT_KEYS = ("document_id", "doc_id", "ref_doc_id", "source")
"""Where metadata name the document that a passage is part of."""

_PART = re.compile(r"(.+)#\d+", re.DOTALL)


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


def sources_of(parts: PromptParts, passages: Sequence[Passage]) -> list[Source]:
    """The source of each window."""
    return [
        Source(
            f"Passage {passage_name(passages[window.passage], window.passage)}",
            labels_of(passages[window.passage]),
        )
        for window in parts.windows
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

    Args:
        parts: the prompt.
        passages: as they were given.
        method: how the windows are read.
        max_new_tokens: of the answer.
        limit: `position_limit`, or `prompt_limit` where there are no windows; None for no limit.

    Raises:
        LimitError: naming the passage (or the query) that is too long, its size and the limit.
    """
    if limit is None:
        return
    fixed = len(parts.prefix_ids) + len(parts.query_ids) + max_new_tokens
    if not parts.windows:
        _check_prompt(fixed, max_new_tokens, limit)
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
    if method.refinement is not None:
        _check_refinement(parts, passages, method, method.refinement, limit)


def _check_prompt(tokens: int, max_new_tokens: int, limit: int) -> None:
    """Refuse a prompt without windows that the model has too few positions for."""
    if tokens > limit:
        raise LimitError(
            f"The prompt has {tokens - max_new_tokens} tokens, and with {max_new_tokens} new ones "
            f"it needs {tokens} of the model's {limit} positions. Shorten the question or the "
            "conversation, or ask for fewer new tokens; retrieved text belongs into passages=, "
            "which are read in windows."
        )


def _check_refinement(
    parts: PromptParts,
    passages: Sequence[Passage],
    method: Method,
    refinement: Refinement,
    limit: int,
) -> None:
    """Refuse windows whose further passes would stand beyond the model's positions."""
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


Messages = str | Sequence[Mapping[str, Any]] | Conversation
PassageLike = Passage | str | Mapping[str, Any]

DEFAULT_NEW_TOKENS = 128


@dataclass(frozen=True, slots=True)
class Request:
    """A checked request.

    Attributes:
        parts: the prompt, tokenized.
        passages: as they were given.
        method: how the query reads the windows.
        max_new_tokens: at most so many tokens are generated.
        stop: strings before which the text ends.
        citations: whether to record attention mass.
        seed: of a private generator, or None.
        options: for transformers' generate.
        on_encoded: told how many windows are encoded, of how many; or None.
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

    def guarded(
        self,
        guard: Guard | None,
        calibrated: Mapping[str, Any] | None,
        ordinary: Callable[[], Request],
    ) -> Request:
        """This request with its guard; as it is without one, without windows, or if it is ordinary.

        Args:
            guard: or None.
            calibrated: the entry ``guard`` of a calibration profile, or None.
            ordinary: makes the request with passages read one after the other.
        """
        if guard is None or not self.parts.windows or not self.method.windowed:
            return self
        spread = guard.spread
        if spread is None and calibrated is not None:
            spread = float(calibrated["threshold"])
        plan: FallbackPlan[Request]
        try:
            plan = FallbackPlan(guard, spread, replace(ordinary(), started=self.started))
        except LimitError as error:
            plan = FallbackPlan(guard, spread, None, str(error))
        return replace(self, fallback=plan)


def check_request(
    prompt: Prompt,
    query: Messages,
    passages: Sequence[PassageLike],
    *,
    prefix: str | None,
    method: Method,
    max_window_tokens: int | None,
    position_limit: int | None,
    prompt_limit: int | None = None,
    max_new_tokens: int | None = None,
    stop: str | Sequence[str] | None = None,
    citations: bool = False,
    seed: int | None = None,
    options: Mapping[str, Any] | None = None,
    on_encoded: OnEncoded | None = None,
    started: float | None = None,
) -> Request:
    """Check and tokenize; for the arguments see `WindowedLM.generate`.

    Raises:
        InputError, PromptError, LimitError: saying what to do.
    """
    started = time.perf_counter() if started is None else started
    options = dict(options or {})
    strings = _stop_strings(stop)
    if isinstance(passages, str | Passage | Mapping):
        raise InputError("passages must be a list of passages, not a single one; wrap it in [].")
    given = tuple(Passage.of(passage) for passage in passages)
    tokens = max_new_tokens
    if tokens is None:
        tokens = getattr(options.get("generation_config"), "max_new_tokens", None)
    if tokens is None:
        tokens = DEFAULT_NEW_TOKENS
    tokens = whole_number("max_new_tokens", tokens)
    check_counts(options)
    # One after the other, passages need no windows to be cut into.
    window_limit = None if in_order(method) else max_window_tokens
    recorder = recorder_of(options)
    parts = prompt.build(query, given, prefix=prefix, max_window_tokens=window_limit)
    limit = position_limit if parts.windows else prompt_limit
    check_limits(parts, given, method, tokens, limit)
    return Request(
        parts=parts,
        passages=given,
        method=method,
        max_new_tokens=tokens,
        stop=strings,
        citations=citations,
        seed=_seed(seed),
        options=options,
        on_encoded=on_encoded,
        started=started,
        logprobs=recorder,
    )


def _stop_strings(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    strings: tuple[object, ...] = (stop,)
    if not isinstance(stop, str):
        strings = tuple(stop or ()) if isinstance(stop, Iterable | None) else (stop,)
    if not all(isinstance(one, str) for one in strings):
        raise InputError(f"stop must be a string or a list of strings, got {stop!r}.")
    if "" in strings:
        raise InputError("A stop string can't be empty; leave it out.")
    return cast("tuple[str, ...]", strings)


def _seed(seed: object) -> int | None:
    """What seeds a generator of PyTorch's, or None."""
    if seed is None:
        return None
    number = None if isinstance(seed, bool) or not isinstance(seed, SupportsIndex) else int(seed)
    if number is None or not -(2**63) <= number < 2**64:
        raise InputError(f"seed must be a whole number from -2**63 to 2**64 - 1, got {seed!r}.")
    return number
