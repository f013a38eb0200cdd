"""What a request gives back: text, citations, usage, timings."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from rag_windows.passage import Note, WindowTokens


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


@dataclass(frozen=True, slots=True)
class Fallback:
    """Why the passages were, or should have been, read one after the other.

    Attributes:
        signal: the guard's signal that was found.
        measured: its value: tokens of all passages.
        threshold: the limit that the value was compared with.
        taken: whether the passages were read one after the other; False where they would not have
            fitted the model's positions and were read in windows instead.
        message: the same as a sentence.
    """

    signal: Literal["few short passages"]
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
        prompt_tokens: tokens of prefix, windows and query.
        cached_tokens: prompt tokens whose keys and values did not have to be computed.
        completion_tokens: generated tokens, with the end token and the reasoning.
        windows: number of windows to read or choose from; passages read one after the other
            count as one.
        cached_windows: windows that were found in the cache.
        reasoning_tokens: of the generated tokens, those of the reasoning with its markers.
    """

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    windows: int = 0
    cached_windows: int = 0
    reasoning_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Timings:
    """Wall-clock seconds.

    Attributes:
        encode_s: to encode prefix and windows, and to choose among them where the method does.
        ttft_s: from the call to the first generated token, with encoding.
        total_s: for the whole call.
    """

    encode_s: float
    ttft_s: float
    total_s: float

    @classmethod
    def of(cls, started: float, encoded_at: float, first_at: float | None) -> Timings:
        """Of a request that ends now, from readings of ``time.perf_counter()``.

        Args:
            started: at the call.
            encoded_at: when its windows were there.
            first_at: at the first token; None if there was none.
        """
        now = time.perf_counter()
        first_at = now if first_at is None else first_at
        return cls(encoded_at - started, first_at - started, now - started)


Support = Literal["yes", "no", "unsure"]


@dataclass(frozen=True, slots=True)
class Citation:
    """Attention that one passage got while the answer was written.

    Attributes:
        passage: index into the passages as they were given.
        id: the passage's id, if it has one.
        mass: share of the attention, averaged over layers, heads and all generated tokens, which
            are those of the reasoning, too; 0 for a passage that made no window (blank, or a
            duplicate of another).
        drop: what the answer's log-probability loses, in nats, when this passage alone is left out
            of what was read; 0 for one that was not read. None without ``citations="removal"``, and
            for a passage beyond its ``top``.
        supports: whether the answer rests on the passage by its ``drop``; "unsure" where several
            passages say the same, so that none is missed alone.
    """

    passage: int
    id: str | None
    mass: float
    drop: float | None = None
    supports: Support | None = None


@dataclass(frozen=True, slots=True)
class Statement:
    """One sentence of an answer, an entry of a list, or a block of code.

    Attributes:
        start: place of its first character in the text.
        end: place behind its last one.
        text: the sentence.
        citations: of the passages that carried it (see `rag_windows.integration.carried`), the
            strongest first; ``mass`` and ``drop`` are those of its own tokens.
    """

    start: int
    end: int
    text: str
    citations: tuple[Citation, ...]


@dataclass(frozen=True, slots=True)
class Generation:
    """One answer.

    Attributes:
        text: the answer, without special tokens and without reasoning, cut before a ``stop``
            string.
        token_ids: every generated token, end token included.
        finish_reason: "stop" at an end token or stop string, "length" at the token or time limit,
            "cancelled" when the stream was closed.
        usage: token counts.
        timings: seconds.
        citations: one for each passage given, in that order; None if switched off. With
            ``prefix_mass`` and ``query_mass`` they sum to one.
        prefix_mass: share of the attention on the prefix; None without citations.
        query_mass: share on the query and the answer so far; None without citations.
        notes: which passages were left out (blank, duplicate) or split (too long).
        windows: for each window its tokens, the passage they come from and the span of its text.
            Empty without passages, and for a method that reads them one after the other.
        fallback: why the guard had the passages read one after the other, or wanted to; None
            without a guard, and where the guard found nothing.
        logprobs: of every generated token with ``logprobs=True``; else None.
        alternatives: the further answers of ``num_return_sequences``.
        reasoning: what the model wrote for itself before the answer, without its markers; empty
            where it did not, or where the chat template has no markers for it.
        supported: whether the passages together make the answer likelier than none does; None
            without ``citations="removal"``.
        statements: the sentences of the text with the passages that carried each of them; empty
            where nothing was measured.
        raw: what ``transformers`` returned (scores, logits and hidden states if requested).
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
    reasoning: str = ""
    supported: bool | None = None
    statements: tuple[Statement, ...] = field(default=(), repr=False)

    @property
    def cited(self) -> tuple[Citation, ...]:
        """Citations of the passages that carried the answer, the strongest first.

        See `rag_windows.integration.carried`. Empty without passages or without citations.
        """
        return carried(self.citations)


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of a stream.

    Attributes:
        text: the new text; all chunks joined are the generation's text.
        generation: the whole result; None on all chunks but the last.
        reasoning: the new reasoning, before the text; all chunks joined are the generation's.
    """

    text: str
    generation: Generation | None = None
    reasoning: str = ""


SHARE_OF_STRONGEST = 0.5
"""A passage is cited with at least this share of the strongest passage's attention mass."""

_ROUNDING = 1e-6
"""Equal masses differ by rounding; none of them is left out for that."""


def carried(citations: Iterable[Citation] | None) -> tuple[Citation, ...]:
    """The passages that carried an answer: by removal where that was asked for, else by attention.

    By removal they are those that support it, or may, where several are alike. By attention, a
    passage is one of them if its attention mass is at least `SHARE_OF_STRONGEST` of the strongest
    passage's, and not below the mean of the passages read. The rule is our own. It names one
    passage where one stands out, several where they share the attention, and all where they got
    equal attention. It shows what the model looked at; it does not prove what the answer is based
    on.

    Args:
        citations: the citations of a `Generation`; None where they were switched off.

    Returns:
        Strongest first; empty if no passage was read.
    """
    given = tuple(citations or ())
    if any(one.drop is not None for one in given):
        proved = [one for one in given if one.supports in ("yes", "unsure")]
        return tuple(sorted(proved, key=lambda one: (-(one.drop or 0.0), one.passage)))
    return by_mass(given)


def by_mass(citations: Iterable[Citation]) -> tuple[Citation, ...]:
    """`carried` by attention alone."""
    read = [citation for citation in citations if citation.mass > 0]
    if not read:
        return ()
    strongest = max(citation.mass for citation in read)
    mean = sum(citation.mass for citation in read) / len(read)
    least = max(SHARE_OF_STRONGEST * strongest, mean) * (1 - _ROUNDING)
    return tuple(sorted((c for c in read if c.mass >= least), key=lambda c: (-c.mass, c.passage)))
