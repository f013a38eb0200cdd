"""What a run found: a run's scores.json."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from rag_windows.evaluation.statistics.estimate import Estimate

FOUND = "found"
MISSED = "missed"


@dataclass(frozen=True, slots=True)
class Against:
    """One arm beside the base on the same questions.

    Attributes:
        base: name of the arm compared with.
        difference: percentage points, this arm minus the base.
        retention: percent of the base's value; NaN where that is 0.
        p: of a two-sided test that both are alike; None where it was not tested.
        p_holm: the same after Holm's correction for all arms of the run; None likewise.
    """

    base: str
    difference: Estimate
    retention: Estimate
    p: float | None = None
    p_holm: float | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """One metric of one arm.

    Attributes:
        metric: such as "response_f1".
        n: examples that it counts.
        estimate: percent.
        against: None for the base itself.
    """

    metric: str
    n: int
    estimate: Estimate
    against: Against | None = None


@dataclass(frozen=True, slots=True)
class Part:
    """The results on some of the examples.

    Attributes:
        label: a kind of example, or "found" and "missed": whether retrieval found evidence.
        examples: how many.
        results: one a metric, in their order; not tested.
    """

    label: str
    examples: int
    results: tuple[Result, ...]


@dataclass(frozen=True, slots=True)
class Counters:
    """Sums over the compared questions of one arm.

    Attributes:
        windows_encoded: computed.
        windows_reused: found in the passage cache.
        prompt_tokens: read.
        cached_tokens: those of them that were not computed anew.
        completion_tokens: written.
        left_out_passages: retrieved passages that did not fit.
        left_out_questions: questions with such passages.
        errors: questions without an answer; they count as wrong.
        unfinished: answers that ended at the limit of their length.
    """

    windows_encoded: int
    windows_reused: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    left_out_passages: int
    left_out_questions: int
    errors: int
    unfinished: int


@dataclass(frozen=True, slots=True)
class Times:
    """Medians over the compared questions of one arm as they came in the run, in seconds.

    Attributes:
        encode_s: prefix and windows.
        ttft_s: to the first token, encoding included.
        total_s: in all.
    """

    encode_s: float
    ttft_s: float
    total_s: float


@dataclass(frozen=True, slots=True)
class SpeedBin:
    """Median seconds to the first token for contexts of about the same length.

    Attributes:
        above: tokens; the contexts are longer,
        up_to: and this long at most.
        tokens: their median length.
        n: contexts measured.
        cold_s: nothing was cached; NaN where it was not measured.
        warm_s: all that the arm can cache was in memory; NaN likewise.
    """

    above: int
    up_to: int
    tokens: float
    n: int
    cold_s: float
    warm_s: float


@dataclass(frozen=True, slots=True)
class ArmSummary:
    """All of one arm.

    Attributes:
        name: such as "ape@20".
        label: the method, such as "ape".
        top_k: passages at most; None for all that an example brings.
        results: one a metric, in their order.
        kinds: the same by kind of example.
        retrieval: the same where retrieval found evidence and where it did not; empty where the
            examples name no evidence.
        counters: sums.
        times: None where no question was answered.
        speed: by length of the context; empty where it was not measured.
        cold_s: median seconds to the first token over all contexts measured, nothing cached; NaN
            where it was not measured.
        warm_s: likewise with all in memory that the arm can cache.
    """

    name: str
    label: str
    top_k: int | None
    results: tuple[Result, ...]
    kinds: tuple[Part, ...]
    retrieval: tuple[Part, ...]
    counters: Counters
    times: Times | None
    speed: tuple[SpeedBin, ...]
    cold_s: float = math.nan
    warm_s: float = math.nan

    def result(self, metric: str) -> Result:
        """That of a metric.

        Raises:
            KeyError: there is none.
        """
        for one in self.results:
            if one.metric == metric:
                return one
        raise KeyError(metric)


@dataclass(frozen=True, slots=True)
class Retrieval:
    """How much of the evidence is among the passages.

    Attributes:
        top_k: passages at most; None for all that an example brings.
        n: examples that name evidence and have answers of every arm.
        recall: percent of an example's evidence, averaged.
        hit: percent of examples with at least one passage of evidence.
    """

    top_k: int | None
    n: int
    recall: Estimate
    hit: Estimate


@dataclass(frozen=True, slots=True)
class Summary:
    """A run's results, on the examples that every arm has a record of.

    Attributes:
        task: name.
        metrics: names, the main one first.
        examples: of the data.
        compared: those with a record of every arm; all figures are of these.
        groups: that they come from, such as conversations; whole ones are resampled.
        missing: records that an unfinished run still lacks, by name of the arm.
        arms: in the order of the run.
        retrieval: one a depth; empty where the examples name no evidence.
    """

    task: str
    metrics: tuple[str, ...]
    examples: int
    compared: int
    groups: int
    missing: Mapping[str, int]
    arms: tuple[ArmSummary, ...]
    retrieval: tuple[Retrieval, ...]

    def arm(self, name: str) -> ArmSummary:
        """That of a name.

        Raises:
            KeyError: there is none.
        """
        for one in self.arms:
            if one.name == name:
                return one
        raise KeyError(name)
