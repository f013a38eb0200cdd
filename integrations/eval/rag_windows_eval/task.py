"""Questions with right answers, records of the answers to them, and a metric of these."""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
from pydantic import BeforeValidator, ConfigDict, Field

from rag_windows.passage import Passage
from rag_windows.results import Support

STRICT = ConfigDict(extra="forbid", allow_inf_nan=False)

LogProbability = Annotated[
    float,
    Field(allow_inf_nan=True),
    # JSON has no infinity: an impossible choice's score is null.
    BeforeValidator(lambda value: -math.inf if value is None else value),
]
Count = Annotated[int, Field(ge=0, lt=2**63)]


def digest_of(text: str) -> str:
    """What names a text: the first 32 hex digits of its sha256."""
    # A file may spell half a surrogate pair, which UTF-8 has no bytes for.
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


@dataclass(frozen=True, slots=True)
class ReadPassage:
    """A passage that an answer was written over; ``text`` names a text of the run's passages.jsonl.

    ``mass`` is its attention weight, 0 to 1, None where it was not measured; ``spans`` are the
    characters of the text that each of its windows held, end exclusive. ``drop`` and ``supports``
    are those of a `rag_windows.Citation`.
    """

    __pydantic_config__ = STRICT

    text: str
    id: str | None = None
    title: str | None = None
    score: float | None = None
    mass: float | None = None
    spans: tuple[tuple[int, int], ...] = ()
    drop: float | None = None
    supports: Support | None = None


@dataclass(frozen=True, slots=True)
class Ablation:
    """How likely an answer is, in nats, without some passages, named by their places."""

    __pydantic_config__ = STRICT

    left_out: tuple[Count, ...]
    logprob: float


@dataclass(frozen=True, slots=True)
class AnswerRecord:
    """One question, by its example's key, answered by one condition; passages are best first.

    ``finish_reason`` is "chosen" where the answer is one of given choices, ``left_out`` counts
    passages that did not fit the model's positions, and ``scores`` are log-probabilities in nats.
    A question with an ``error`` is asked again when the run goes on. Where ``warm_s`` is there,
    ``ttft_s`` are the seconds to the first token with an empty cache, and ``warm_s`` those with the
    windows that this asking left in it. Of a `CitationsTask` only: ``tokens`` are those of the
    answer, ``effects`` what was measured of its citations, in nats or percent, and ``ablations``
    how likely it is without halves of the passages.
    """

    # A field that is no longer written, as of a folder of an earlier version, is ignored.
    __pydantic_config__ = ConfigDict(allow_inf_nan=False)

    key: str
    arm: str
    answer: str
    finish_reason: str = "stop"
    passages: tuple[ReadPassage, ...] = ()
    left_out: Count = 0
    prefix_mass: float | None = None
    query_mass: float | None = None
    prompt_tokens: Count = 0
    cached_tokens: Count = 0
    completion_tokens: Count = 0
    windows_encoded: Count = 0
    windows_reused: Count = 0
    encode_s: float = 0.0
    ttft_s: float = 0.0
    total_s: float = 0.0
    warm_s: float | None = None
    scores: Mapping[str, LogProbability] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    error: str | None = None
    supported: bool | None = None
    tokens: tuple[Count, ...] = ()
    effects: Mapping[str, float] = field(default_factory=dict)
    ablations: tuple[Ablation, ...] = ()


def line_of(record: AnswerRecord) -> dict[str, Any]:
    """The JSON object that is written as a line of a records.jsonl."""
    scores = {name: None if one == -math.inf else one for name, one in record.scores.items()}
    return {**asdict(record), "scores": scores}


Array = npt.NDArray[np.float64]
Formula = Callable[[Array], Array]


@dataclass(frozen=True, slots=True)
class Reference:
    """One right answer, the dataset's name for its sort, and ids of the passages it rests on."""

    text: str
    kind: str | None = None
    evidence: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TaskExample:
    """One question with its right answers; its key is the same on every reading of the dataset.

    Examples of a ``group``, as the turns of a conversation, are resampled together, and results are
    broken down by ``kinds``. ``passages`` are the dataset's own, best first: INSCIT's are its
    evidence. ``details`` are what the dataset's own metric or file format needs in addition.
    """

    key: str
    messages: tuple[Mapping[str, str], ...]
    references: tuple[Reference, ...]
    group: str
    kinds: tuple[str, ...] = ()
    passages: tuple[Passage, ...] = ()
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def question(self) -> str:
        """The last message."""
        return self.messages[-1]["content"]

    @property
    def conversation(self) -> Sequence[Mapping[str, str]]:
        """The messages as the data have them, before they were worded as an instruction."""
        found: Sequence[Mapping[str, str]] = self.details.get("conversation", self.messages)
        return found

    @property
    def evidence(self) -> frozenset[str]:
        """Ids of all passages that any right answer rests on."""
        return frozenset(name for one in self.references for name in one.evidence)


def ratio(sums: Array) -> Array:
    """First sum by the second, (..., 2) to (...); NaN where that is 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(sums[..., 1] == 0, np.nan, sums[..., 0] / sums[..., 1])


@dataclass(frozen=True, slots=True, eq=False)
class MetricScore:
    """One metric of one condition in percent, as sums over examples, for any draw of them.

    ``rows`` (examples, k) are what is added up, zeros for an example that does not count, and
    ``formula`` makes (...) percent of (..., k) sums.
    """

    name: str
    rows: Array
    formula: Formula = ratio

    @classmethod
    def mean(cls, name: str, values: Sequence[float | None]) -> MetricScore:
        """The mean of those values that are not None."""
        rows = [(0.0, 0.0) if one is None else (one, 1.0) for one in values]
        return cls(name, np.array(rows, dtype=np.float64))

    @property
    def value(self) -> float:
        """The metric of all examples."""
        return float(self.formula(self.rows.sum(axis=0)))

    @property
    def values(self) -> Array:
        """The metric of each example; NaN for one that does not count."""
        return self.formula(self.rows)


@dataclass(frozen=True, kw_only=True)
class Task(ABC):
    """A dataset, ready to be asked.

    ``settings`` are what the answers depend on, for the manifest: digests of the files, options;
    as JSON. ``prefix``, the instruction before the passages, and ``max_new_tokens`` hold unless the
    user gives others; ``behind_own_system`` puts that prefix behind the chat template's own system
    message. ``pool`` is what a retriever searches.
    """

    name: str
    examples: Sequence[TaskExample]
    settings: Mapping[str, Any]
    prefix: str | None = None
    behind_own_system: bool = False
    max_new_tokens: int = 64
    pool: Sequence[Passage] = ()

    def notes(self) -> list[str]:
        """What a user should know of the data, a sentence each."""
        return []

    @abstractmethod
    def scores(
        self, examples: Sequence[TaskExample], records: Sequence[AnswerRecord]
    ) -> list[MetricScore]:
        """Score one condition's records, one an example in the same order; main metric first."""
