"""A question with its passages, checked and tokenized before any work."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, SupportsIndex, cast

from rag_windows.conversation import Conversation
from rag_windows.encoding import OnEncoded
from rag_windows.errors import InputError, LimitError
from rag_windows.guard import FallbackPlan, Guard
from rag_windows.limits import check_limits, in_order
from rag_windows.logprobs import LogprobRecorder, recorder_of
from rag_windows.passage import Passage
from rag_windows.prompt import Prompt, PromptParts
from rag_windows.refused_options import check_counts, whole_number
from rag_windows.rescaling import Method

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
