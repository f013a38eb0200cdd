"""What is kept of one answered question: a line of a run's records.jsonl."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self

from rag_windows.evaluation.texts import digest_of
from rag_windows.passage import Passage


@dataclass(frozen=True, slots=True)
class ReadPassage:
    """A passage that an answer was written over.

    Attributes:
        text: names the text in the run's passages.jsonl, which holds each text once.
        id: of the passage, if it has one.
        title: likewise.
        score: the retriever's.
        mass: share of the attention, 0 to 1; None where it was not measured.
        spans: what of the text each of its windows held, in characters, end exclusive; empty for a
            passage that had no window of its own.
    """

    text: str
    id: str | None = None
    title: str | None = None
    score: float | None = None
    mass: float | None = None
    spans: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(
        cls,
        passage: Passage,
        mass: float | None = None,
        spans: tuple[tuple[int, int], ...] = (),
    ) -> Self:
        """What is kept of a passage; its text has to be kept beside."""
        text = digest_of(passage.text)
        return cls(text, passage.id, passage.title, passage.score, mass, spans)


@dataclass(frozen=True, slots=True)
class Record:
    """One question answered by one arm.

    Attributes:
        key: of the example.
        arm: of the run, such as "ape@20".
        answer: the text; empty where ``error`` is set.
        finish_reason: "stop" or "length"; "chosen" where the answer is one of given choices.
        passages: best first.
        left_out: passages from the end of the ranking that did not fit the model's positions.
        prefix_mass: share of the attention on the prefix; None where it was not measured.
        query_mass: likewise on the question and the answer so far.
        prompt_tokens: prefix, windows and query.
        cached_tokens: those of them that were not computed anew.
        completion_tokens: generated.
        windows_encoded: windows computed for this answer.
        windows_reused: windows found in the passage cache.
        encode_s: seconds for prefix and windows.
        ttft_s: seconds to the first token, encoding included.
        total_s: seconds in all.
        scores: log-probability of each choice in nats; empty without choices.
        notes: what the engine told of blank, duplicate and overlong passages.
        error: why there is no answer; None where there is one. Such a question is asked again when
            the run goes on.
    """

    key: str
    arm: str
    answer: str
    finish_reason: str = "stop"
    passages: tuple[ReadPassage, ...] = ()
    left_out: int = 0
    prefix_mass: float | None = None
    query_mass: float | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    windows_encoded: int = 0
    windows_reused: int = 0
    encode_s: float = 0.0
    ttft_s: float = 0.0
    total_s: float = 0.0
    scores: Mapping[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Speed:
    """Seconds to the first token over the same passages, cold and warm, in alternating rounds.

    Attributes:
        key: of the example.
        arm: of the run.
        context_tokens: of the passages as they were read.
        cold_s: one a round; nothing was cached.
        warm_s: one a round; all that this arm can cache was cached in memory.
    """

    key: str
    arm: str
    context_tokens: int
    cold_s: tuple[float, ...]
    warm_s: tuple[float, ...]
