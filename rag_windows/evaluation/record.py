"""What is kept of one answered question, and of one timed one: a line of a run's records.jsonl."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, ConfigDict, Field

from rag_windows.evaluation.files import Place, validated
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
    """A passage that an answer was written over.

    Attributes:
        text: names the text in the run's passages.jsonl, which holds each text once.
        id: of the passage, if it has one.
        title: likewise.
        score: the retriever's.
        mass: attention weight, 0 to 1; None where it was not measured.
        spans: what of the text each of its windows held, in characters, end exclusive; empty for a
            passage that had no window of its own.
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
        prefix_mass: attention weight of the prefix; None where it was not measured.
        query_mass: likewise of the question and the answer so far.
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

    __pydantic_config__ = STRICT

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
    """Seconds to the first token over the same passages, cold and warm, in alternating rounds.

    Attributes:
        key: of the example.
        arm: of the run.
        context_tokens: of the passages as they were read.
        cold_s: one a round; nothing was cached.
        warm_s: one a round; all that this arm can cache was cached in memory.
    """

    __pydantic_config__ = STRICT

    key: str
    arm: str
    context_tokens: int
    cold_s: tuple[float, ...]
    warm_s: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class _Kind:
    __pydantic_config__ = ConfigDict(extra="ignore")

    kind: Literal["record", "speed"]


def line_of(value: Record | Speed) -> dict[str, Any]:
    """A line of a records.jsonl."""
    line = {"kind": type(value).__name__.lower(), **asdict(value)}
    if scores := line.get("scores"):
        line["scores"] = {key: None if one == -math.inf else one for key, one in scores.items()}
    return line


def read_line(line: Mapping[str, Any], place: Place) -> Record | Speed:
    """What `line_of` wrote.

    Raises:
        DataError: an unknown kind or field, a field that is missing or holds something else.
    """
    kind = validated(_Kind, line, place).kind
    rest = {name: value for name, value in line.items() if name != "kind"}
    if kind == "record":
        return validated(Record, rest, place)
    return validated(Speed, rest, place)
