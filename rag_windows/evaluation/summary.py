"""What a run found: scores.json, from the records of its arms."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import numpy as np
import pandas as pd

from rag_windows.evaluation.metrics import retrieval_scores
from rag_windows.evaluation.record import Record, Speed
from rag_windows.evaluation.run import Arm, RunFolder, base_of
from rag_windows.evaluation.statistics import (
    Estimate,
    bootstrap,
    estimate,
    group_sums,
    holm,
    p_values,
    percent,
)
from rag_windows.evaluation.task import Array, Example, Score, Task, mean_rows, ratio

FORMAT, VERSION = "rag-windows evaluation summary", 1

SHORTEST = 256
"""Tokens up to which all contexts share a bin; every further bin is twice as long."""


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
    """Median seconds over the answered questions as they came in the run; see `Record`."""

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

    @property
    def base(self) -> str | None:
        """The arm that this one is compared with; None for the base itself, or without any."""
        return next((one.against.base for one in self.results if one.against is not None), None)


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

    def as_json(self) -> dict[str, Any]:
        """The summary as a JSON object; NaN is null."""
        made: dict[str, Any] = _plain({"format": FORMAT, "version": VERSION, **asdict(self)})
        return made

    def dump(self) -> str:
        """The text of a scores.json."""
        return json.dumps(self.as_json(), indent=1, allow_nan=False) + "\n"


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _plain(entry) for key, entry in value.items()}
    return [_plain(entry) for entry in value] if isinstance(value, list | tuple) else value


def summarise(task: Task, folder: RunFolder) -> Summary:
    """Summarise what a run of a task has answered so far."""
    compared = folder.manifest.arms
    return summarise_records(
        task,
        compared,
        {one.name: folder.records(one.name) for one in compared},
        {one.name: folder.speeds(one.name).values() for one in compared},
    )


def summarise_records(
    task: Task,
    arms: Sequence[Arm],
    records: Mapping[str, Mapping[str, Record]],
    speeds: Mapping[str, Iterable[Speed]] | None = None,
) -> Summary:
    """Summarise records, wherever they come from.

    Args:
        task: gives the examples and the scores.
        arms: at least one.
        records: of each arm by its name, then by the key of the example.
        speeds: of each arm by its name; None where none were measured.
    """
    by_arm = [records.get(arm.name, {}) for arm in arms]
    shared = [one for one in task.examples if all(one.key in found for found in by_arm)]
    answers = [[found[one.key] for one in shared] for found in by_arm]
    groups = [one.group for one in shared]
    retrieved = _retrieved(arms, shared, answers)
    kinds = {
        kind: np.array([kind in one.kinds for one in shared])
        for kind in dict.fromkeys(kind for one in shared for kind in one.kinds)
    }
    masks = [np.ones(len(shared), dtype=np.bool_), *kinds.values()]
    for _, hits in retrieved.values():
        masks += [hits > 0, hits == 0]
    figures: list[list[list[Result]]] = []
    if shared:
        scored = [{one.name: one for one in task.scores(shared, answered)} for answered in answers]
        for metric in task.metrics:
            figures.append(_results([one[metric] for one in scored], arms, groups, masks))

    def parts(labels: Iterable[str], first: int, arm: int) -> tuple[Part, ...]:
        return tuple(
            Part(label, int(masks[place].sum()), tuple(one[place][arm] for one in figures))
            for place, label in enumerate(labels, start=first)
        )

    first = {depth: 1 + len(kinds) + 2 * n for n, depth in enumerate(retrieved)}
    made = []
    for place, arm in enumerate(arms):
        measured = _seconds((speeds or {}).get(arm.name, ()))
        split = ("found", "missed") if arm.top_k in retrieved else ()
        made.append(
            ArmSummary(
                arm.name,
                arm.label,
                arm.top_k,
                tuple(one[0][place] for one in figures),
                parts(kinds, 1, place),
                parts(split, first.get(arm.top_k, 0), place),
                _counters(answers[place]),
                _times(answers[place]),
                _bins(measured),
                float(measured["cold_s"].median()),
                float(measured["warm_s"].median()),
            )
        )
    return Summary(
        task=task.name,
        metrics=tuple(task.metrics),
        examples=len(task.examples),
        compared=len(shared),
        groups=len(set(groups)),
        missing={
            arm.name: sum(one.key not in found for one in task.examples)
            for arm, found in zip(arms, by_arm, strict=True)
        },
        arms=tuple(made),
        retrieval=tuple(
            Retrieval(
                depth,
                int(np.isfinite(hits).sum()),
                *(_mean(one, groups) for one in (recall, hits)),
            )
            for depth, (recall, hits) in retrieved.items()
        ),
    )


def _results(
    scores: Sequence[Score], arms: Sequence[Arm], groups: Sequence[str], masks: Sequence[Any]
) -> list[list[Result]]:
    """One metric of all arms, by mask and arm; tested on the first mask, which holds all."""
    rows = np.stack([one.rows for one in scores], axis=1)
    formula, bases = scores[0].formula, [base_of(arms, place) for place in range(len(arms))]
    # All parts in one bootstrap: they have the same draws, which take most of the time.
    sums = [group_sums(np.where(mask[:, None, None], rows, 0.0), groups) for mask in masks]
    values, drawn = bootstrap(np.concatenate(sums, axis=1), formula)
    p = [math.nan] * len(arms)
    for base in set(bases):
        own = [place for place, one in enumerate(bases) if one == base != place]
        for place, found in zip(
            own, p_values(sums[0][:, [base, *own]], 0, formula)[1:], strict=True
        ):
            p[place] = found
    corrected = holm(p)

    def result(section: int, arm: int) -> Result:
        column, base = section * len(arms) + arm, section * len(arms) + bases[arm]
        # An example that a metric does not count adds nothing at all.
        n = int(rows[masks[section], arm].any(axis=1).sum())
        own, other = values[column], values[base]
        against = None
        if column != base:
            tested = (None, None) if section else (p[arm], corrected[arm])
            apart = None if drawn is None else drawn[column] - drawn[base]
            kept = None if drawn is None else percent(drawn[column], drawn[base])
            against = Against(
                arms[bases[arm]].name,
                estimate(own - other, apart),
                estimate(float(percent(own, other)), kept),
                *tested,
            )
        found = estimate(own, None if drawn is None else drawn[column])
        if section == 0:
            # The dataset's own figure, to the last bit.
            found = Estimate(scores[arm].value, found.low, found.high)
        return Result(scores[arm].name, n, found, against)

    return [[result(section, arm) for arm in range(len(arms))] for section in range(len(masks))]


def _retrieved(
    arms: Sequence[Arm], examples: Sequence[Example], answers: Sequence[Sequence[Record]]
) -> dict[int | None, tuple[Array, Array]]:
    """By depth, recall and hit of each example; NaN for one without evidence, or that nobody read.

    All arms of a depth got the same ranking, and one that could not hold all of it left out its
    end, so the longest list is the ranking.
    """
    found = {}
    for depth in dict.fromkeys(arm.top_k for arm in arms):
        own = [one for arm, one in zip(arms, answers, strict=True) if arm.top_k == depth]
        rankings: list[list[str | None]] = []
        usable = []
        for place, (example, *read) in enumerate(zip(examples, *own, strict=True)):
            answered = [one.passages for one in read if one.error is None]
            if example.evidence and answered:
                rankings.append([one.id for one in max(answered, key=len)])
                usable.append(place)
        if usable:
            deep = max(1, depth or max(map(len, rankings)))
            scores = retrieval_scores([examples[place] for place in usable], rankings, (deep,))
            both = np.full((2, len(examples)), np.nan)
            both[:, usable] = [scores[0].values, scores[1].values]
            found[depth] = (both[0], both[1])
    return found


def _mean(values: Array, groups: Sequence[str]) -> Estimate:
    rows = mean_rows([None if math.isnan(one) else one for one in values.tolist()])
    found, drawn = bootstrap(group_sums(rows, groups)[:, None], ratio)
    return estimate(found[0], None if drawn is None else drawn[0])


def _counters(records: Sequence[Record]) -> Counters:
    def total(name: str) -> int:
        return sum(getattr(one, name) for one in records)

    return Counters(
        windows_encoded=total("windows_encoded"),
        windows_reused=total("windows_reused"),
        prompt_tokens=total("prompt_tokens"),
        cached_tokens=total("cached_tokens"),
        completion_tokens=total("completion_tokens"),
        left_out_passages=total("left_out"),
        left_out_questions=sum(one.left_out > 0 for one in records),
        errors=sum(one.error is not None for one in records),
        unfinished=sum(one.error is None and one.finish_reason == "length" for one in records),
    )


def _times(records: Iterable[Record]) -> Times | None:
    answered = [(one.encode_s, one.ttft_s, one.total_s) for one in records if one.error is None]
    return Times(*map(median, zip(*answered, strict=True))) if answered else None


def _seconds(speeds: Iterable[Speed]) -> pd.DataFrame:
    """A row a context, with the medians of its rounds."""
    rows = [
        (one.context_tokens, *(median(times or (math.nan,)) for times in (one.cold_s, one.warm_s)))
        for one in speeds
    ]
    return pd.DataFrame(rows, columns=["tokens", "cold_s", "warm_s"], dtype=np.float64)


def _bins(measured: pd.DataFrame) -> tuple[SpeedBin, ...]:
    """Contexts up to 256 tokens, up to 512, up to 1,024 and so on; empty bins are not there."""
    up_to = 2 ** np.ceil(np.log2(measured["tokens"].clip(lower=SHORTEST)))
    return tuple(
        SpeedBin(
            0 if end == SHORTEST else int(end) // 2,
            int(end),
            float(one["tokens"].median()),
            len(one),
            float(one["cold_s"].median()),
            float(one["warm_s"].median()),
        )
        for end, one in measured.groupby(up_to)
    )
