"""What is kept of one answered question, and of one timed one: a line of a run's records.jsonl."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, ConfigDict, Field

from rag_windows.passage import Passage

STRICT = ConfigDict(extra="forbid", allow_inf_nan=False)

LogProbability = Annotated[
    float,
    Field(allow_inf_nan=True),
    # JSON has no infinity: an impossible choice's score is null.
    BeforeValidator(lambda value: -math.inf if value is None else value),
]


def digest_of(text: str) -> str:
    """What names a text: the first 32 hex digits of its sha256."""
    # A file may spell half a surrogate pair, which UTF-8 has no bytes for.
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


@dataclass(frozen=True, slots=True)
class ReadPassage:
    """A passage that an answer was written over; ``text`` names a text of the run's passages.jsonl.

    ``mass`` is its attention weight, 0 to 1, None where it was not measured; ``spans`` are what of
    the text each of its windows held, in characters, end exclusive.
    """

    __pydantic_config__ = STRICT

    text: str
    id: str | None = None
    title: str | None = None
    score: float | None = None
    mass: float | None = None
    spans: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(
        cls, passage: Passage, mass: float | None = None, spans: tuple[tuple[int, int], ...] = ()
    ) -> Self:
        """What is kept of a passage; its text has to be kept beside."""
        text = digest_of(passage.text)
        return cls(text, passage.id, passage.title, passage.score, mass, spans)


@dataclass(frozen=True, slots=True)
class Record:
    """One question, by its example's key, answered by one arm; passages are best first.

    Attributes:
        finish_reason: "stop" or "length"; "chosen" where the answer is one of given choices.
        left_out: passages from the end of the ranking that did not fit the model's positions.
        prefix_mass: attention weight, as ``query_mass``; None where it was not measured.
        cached_tokens: those of the prompt's tokens that were not computed anew.
        encode_s: seconds for prefix and windows; those to the first token include them.
        scores: log-probability of each choice in nats.
        error: why the answer is empty; such a question is asked again when the run goes on.
    """

    __pydantic_config__ = STRICT

    kind: Literal["record"] = field(default="record", kw_only=True)
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
    scores: Mapping[str, LogProbability] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Speed:
    """Seconds to the first token in each round: cold, and with all cached that can be."""

    __pydantic_config__ = STRICT

    kind: Literal["speed"] = field(default="speed", kw_only=True)
    key: str
    arm: str
    context_tokens: int
    cold_s: tuple[float, ...]
    warm_s: tuple[float, ...]


Line = Annotated[Record | Speed, Field(discriminator="kind")]
"""Of a records.jsonl."""


def line_of(value: Record | Speed) -> dict[str, Any]:
    """What is written as a `Line`."""
    line = asdict(value)
    for name, score in line.get("scores", {}).items():
        line["scores"][name] = None if score == -math.inf else score
    return line
