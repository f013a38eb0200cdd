"""What comes back from a generation."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from rag_windows.logprobs import TokenLogprob
from rag_windows.prompt import Note, WindowTokens

FinishReason = Literal["stop", "length", "cancelled"]
Signal = Literal["few short passages", "multi-hop"]


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
