"""What a request gives back: text, citations, usage, timings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from transformers import LogitsProcessor

from rag_windows.errors import GenerationError, InputError
from rag_windows.prompt.builder import Note, WindowTokens

MOST = 20
"""Further tokens that may be asked for at each place."""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One token of an answer.

    Attributes:
        id: of the token.
        logprob: natural logarithm of its probability, by the model's own distribution: before
            temperature, top-p and a form that the answer has to have.
        top: the likeliest tokens in its place, as (id, logprob), the likeliest first.
    """

    id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class LogprobRecorder(LogitsProcessor):
    """Notes the distribution of each token of one answer.

    Args:
        top: how many of the likeliest tokens to note in each place.
    """

    def __init__(self, top: int) -> None:
        self._top = top
        self._first: int | None = None
        self._noted: dict[int, TokenLogprob] = {}
        self._newest: tuple[int, torch.Tensor] | None = None

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Note; the scores stay as they are."""
        if len(scores) != 1:
            raise GenerationError(
                "logprobs are those of one sequence; leave num_beams and num_return_sequences out."
            )
        length = input_ids.shape[1]
        if self._first is None or length <= self._first:
            self._first, self._noted = length, {}
        elif self._newest is not None:
            place, row = self._newest
            self._noted[place] = self._note(int(input_ids[0, place]), row)
        self._newest = length, scores[0].float().log_softmax(-1)
        return scores

    def tokens(self, ids: Sequence[int]) -> tuple[TokenLogprob, ...]:
        """What was noted of an answer with these tokens."""
        if self._first is None or not ids:
            return ()
        noted = dict(self._noted)
        if self._newest is not None and self._newest[0] == self._first + len(ids) - 1:
            place, row = self._newest
            noted[place] = self._note(ids[-1], row)
        return tuple(noted[self._first + place] for place in range(len(ids)))

    def _note(self, token: int, row: torch.Tensor) -> TokenLogprob:
        best = row.topk(self._top)
        top = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        return TokenLogprob(token, float(row[token]), tuple(top))


def recorder_of(options: dict[str, Any]) -> LogprobRecorder | None:
    """Take ``logprobs`` and ``top_logprobs`` out of the options of ``generate``.

    Returns:
        What notes them, which then stands first among the options' logits processors; or None.

    Raises:
        InputError: they can't be had with the other options.
    """
    wanted, top = options.pop("logprobs", None), options.pop("top_logprobs", None)
    if not isinstance(wanted, bool | None):
        raise InputError(
            f"logprobs must be True or False, got {wanted!r}; top_logprobs is a number of tokens."
        )
    if top is not None and (not isinstance(top, int) or not 0 <= top <= MOST):
        raise InputError(f"top_logprobs must be a whole number from 0 to {MOST}, got {top!r}.")
    if not wanted:
        if top:
            raise InputError("top_logprobs needs logprobs=True.")
        return None
    _refuse_drafts(options)
    recorder = LogprobRecorder(top or 0)
    options["logits_processor"] = [recorder, *(options.get("logits_processor") or [])]
    return recorder


def _refuse_drafts(options: Mapping[str, Any]) -> None:
    for name in ("assistant_model", "prompt_lookup_num_tokens"):
        if options.get(name) is not None:
            raise InputError(
                f"logprobs can't be noted with {name}, which checks drafts of several tokens at "
                "once; leave one of them out."
            )


Signal = Literal["few short passages", "multi-hop"]


@dataclass(frozen=True, slots=True)
class Fallback:
    """Why an answer was, or should have been, given in the ordinary way.

    Attributes:
        signal: which of the guard's signals spoke.
        measured: its value: tokens of all passages, or a spread.
        threshold: what it was held against.
        taken: whether the passages were read one after the other; False where they would not have
            fitted the model's positions, and were read in windows after all.
        message: all this in a sentence.
    """

    signal: Signal
    measured: float
    threshold: float
    taken: bool
    message: str

    def as_dict(self) -> dict[str, Any]:
        """The same as plain JSON."""
        return {name: getattr(self, name) for name in Fallback.__slots__}


FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts.

    Attributes:
        prompt_tokens: prefix, windows and query.
        cached_tokens: those of them whose keys and values were not computed anew.
        completion_tokens: generated, the end token included.
        windows: encoded or found, to be read or chosen from; passages read one after the other
            make one.
        cached_windows: those of them that were found in the cache.
    """

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    windows: int = 0
    cached_windows: int = 0


@dataclass(frozen=True, slots=True)
class Timings:
    """Wall-clock seconds.

    Attributes:
        encode_s: prefix and windows.
        ttft_s: from the call to the first generated token, encoding included.
        total_s: the whole call.
    """

    encode_s: float
    ttft_s: float
    total_s: float


@dataclass(frozen=True, slots=True)
class Citation:
    """Attention that one passage got while the answer was written.

    Attributes:
        passage: index into the passages as they were given.
        id: the passage's id, if it has one.
        mass: share of the attention, averaged over layers, heads and answer tokens; 0 for a
            passage that made no window (blank, or a duplicate of another).
    """

    passage: int
    id: str | None
    mass: float


@dataclass(frozen=True, slots=True)
class Generation:
    """One answer.

    Attributes:
        text: the answer, without special tokens, cut before a ``stop`` string.
        token_ids: every generated token, end token included.
        finish_reason: "stop" at an end token or stop string, "length" at the token or time limit,
            "cancelled" when the stream was closed.
        usage: token counts.
        timings: seconds.
        citations: one per passage given, in that order; None if switched off. With
            ``prefix_mass`` and ``query_mass`` they sum to one.
        prefix_mass: share of the attention on the prefix; None without citations.
        query_mass: share on the query and the answer so far; None without citations.
        notes: what was done with blank, duplicate and overlong passages.
        windows: the record of what was read in a window of its own: its tokens, the passage they
            come from and the span of its text. Empty without passages, and for a method that
            reads them one after the other.
        fallback: why the answer was given in the ordinary way, or would have been; None without a
            guard, and where the guard found nothing.
        logprobs: of every generated token, where ``logprobs=True`` asked for them; else None.
        alternatives: further answers where ``num_return_sequences`` asked for them.
        raw: what ``transformers`` returned (scores, logits, hidden states where asked for).
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    usage: Usage
    timings: Timings
    citations: tuple[Citation, ...] | None = None
    prefix_mass: float | None = None
    query_mass: float | None = None
    notes: tuple[Note, ...] = ()
    windows: tuple[WindowTokens, ...] = field(default=(), repr=False)
    fallback: Fallback | None = None
    logprobs: tuple[TokenLogprob, ...] | None = field(default=None, repr=False)
    alternatives: tuple[Generation, ...] = ()
    raw: Any = field(default=None, repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of a stream.

    Attributes:
        text: what came since the last chunk; all chunks joined are the generation's text.
        generation: the whole result, on the last chunk only.
    """

    text: str
    generation: Generation | None = None


SHARE_OF_STRONGEST = 0.5
"""A passage is cited with at least this share of the strongest passage's attention mass."""

_ROUNDING = 1e-6
"""Equal masses differ by rounding; none of them is left out for that."""


def carried(citations: Iterable[Citation] | None) -> tuple[Citation, ...]:
    """The passages that carried an answer.

    A passage did if its attention mass is at least `SHARE_OF_STRONGEST` of the strongest passage's,
    and not below the mean of the passages read. The rule is ours: it names one passage where one
    stands out, several where they share the attention, and all of them where the attention tells
    them not apart. It is evidence of what the model looked at, no proof of what the answer is
    based on.

    Args:
        citations: of a `Generation`; None where they were switched off.

    Returns:
        Strongest first; empty if no passage was read.
    """
    read = [citation for citation in citations or () if citation.mass > 0]
    if not read:
        return ()
    strongest = max(citation.mass for citation in read)
    mean = sum(citation.mass for citation in read) / len(read)
    least = max(SHARE_OF_STRONGEST * strongest, mean) * (1 - _ROUNDING)
    return tuple(sorted((c for c in read if c.mass >= least), key=lambda c: (-c.mass, c.passage)))
