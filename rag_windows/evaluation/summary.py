"""Intervals and tests for what was measured on the same questions with several methods.

Data come in groups that go together, as the turns of a conversation do, so whole groups are drawn
again (A. C. Davison, D. V. Hinkley, Bootstrap Methods and their Application, 1997, section 3.8) or
exchanged between two methods (E. W. Noreen 1989; S. Riezler, J. T. Maxwell 2005). A group's
observation is the sums of its metric's rows.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from pydantic import TypeAdapter
from scipy import stats

from rag_windows.evaluation.run import Arm, RunFolder, base_of
from rag_windows.evaluation.task import Array, Example, Formula, Record, Score, Speed, Task, ratio

RESAMPLES = 2000
PERMUTATIONS = 9_999
SEED = 20260
MOST_LOST = 0.01
"""Share of draws without a value above which there is no interval: the rest would be a choice."""

_BATCH = 250


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure with the ends of its 95% interval; NaN where there is none."""

    value: float
    low: float = math.nan
    high: float = math.nan

    @property
    def bounded(self) -> bool:
        """Whether there is an interval."""
        return not math.isnan(self.low)


def group_sums(rows: Array, groups: Sequence[str]) -> Array:
    """(examples, ...) to (groups, ...): what the examples of each group add up to."""
    names, numbers = np.unique(groups, return_inverse=True)
    sums = np.zeros((len(names), *rows.shape[1:]))
    np.add.at(sums, numbers, rows)
    return sums


def bootstrap(sums: Array, formula: Formula) -> tuple[Array, Array]:
    """A metric in several columns, such as arms, and its values for draws of whole groups.

    ``sums`` are (groups, columns, k). Values are (columns,), drawn ones (columns, draws), with the
    same draws for all columns; NaN where there are fewer than two groups.
    """
    groups, flat = len(sums), sums.reshape(len(sums), -1)

    def statistic(places: npt.NDArray[np.intp], axis: int = -1) -> Array:
        drawn = np.moveaxis(places, axis, -1).reshape(-1, groups)
        counts = np.zeros(drawn.shape)
        np.add.at(counts, (np.arange(len(drawn))[:, None], drawn), 1.0)
        values = formula((counts @ flat).reshape(len(drawn), *sums.shape[1:])).T
        return values if places.ndim > 1 else values[:, 0]

    values = formula(sums.sum(axis=0))
    if groups < 2:
        return values, np.full((len(values), 1), np.nan)
    with warnings.catch_warnings(), np.errstate(invalid="ignore"):
        # Of columns without a value, whose intervals are not used.
        warnings.simplefilter("ignore")
        found = stats.bootstrap(
            (np.arange(groups),),
            statistic,
            n_resamples=RESAMPLES,
            batch=_BATCH,
            method="percentile",
            vectorized=True,
            rng=np.random.default_rng(SEED),
        )
    return values, found.bootstrap_distribution


def estimate(value: Any, drawn: Array) -> Estimate:
    """A value with the percentiles of its drawn values; those not finite are left out."""
    # Rounded, since equal answers differ in their last bits where sums come in another order.
    value, finite = round(float(value), 10) + 0.0, drawn[np.isfinite(drawn)]
    if math.isnan(value) or len(finite) < (1 - MOST_LOST) * len(drawn):
        return Estimate(value)
    low, high = np.percentile(np.round(finite, 10) + 0.0, (2.5, 97.5))
    return Estimate(value, float(low), float(high))


def percent(values: Any, bases: Any) -> Array:
    """Values in percent of others; NaN where those are 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(bases == 0, np.nan, 100 * values / bases)


def p_values(sums: Array, bases: Sequence[int], formula: Formula) -> list[tuple[float, float]]:
    """Two-sided p values of arms against their bases: each alone, and after Holm's correction.

    If two methods were alike, their answers to a group's questions could as well have been
    exchanged. Exact where there are few ways to exchange; else some are drawn, and the observed one
    counts beside them (B. Phipson, G. K. Smyth 2010), so that p is never 0.

    Args:
        sums: (groups, arms, k).
        bases: places of the arms compared with; a base's own is no test.
        formula: (..., k) sums to (...) percent; p is NaN where an arm or its base has no value.
    """
    groups, arms, size = sums.shape
    whole, others = sums.sum(axis=0), np.array(bases)
    unknown = np.isnan(formula(whole) - formula(whole[others])) | (others == np.arange(arms))
    change = (sums[:, others] - sums).reshape(groups, -1)

    def apart(own: npt.NDArray[np.intp], _: Any, axis: int = -1) -> Array:
        # Places from 0 are an arm's own answers, and those behind them the base's.
        exchanged = np.moveaxis(own, axis, -1) >= groups
        moved = (exchanged @ change).reshape(*exchanged.shape[:-1], arms, size)
        found = np.abs(formula(whole + moved) - formula(whole[others] - moved))
        # What can't be computed for an exchange counts against a difference.
        return np.where(unknown, 0.0, np.nan_to_num(np.round(found, 9), nan=np.finfo(float).max))

    p, places = np.ones(arms), np.arange(groups)
    if groups > 1:
        p = stats.permutation_test(
            (places, places + groups),
            apart,
            permutation_type="samples",
            alternative="greater",
            n_resamples=PERMUTATIONS,
            batch=_BATCH,
            vectorized=True,
            rng=np.random.default_rng(SEED),
        ).pvalue
    alone = np.where(unknown, np.nan, p)
    return list(zip(alone.tolist(), holm(alone), strict=True))


def holm(p: Array) -> list[float]:
    """S. Holm's step-down correction (1979) of one family; NaN stays NaN and is no member.

    scipy has corrections of the false discovery rate only.
    """
    order, corrected = np.argsort(p)[: np.isfinite(p).sum()], p.copy()
    steps = np.maximum.accumulate(p[order] * np.arange(len(order), 0, -1))
    corrected[order] = np.minimum(1.0, steps)
    return corrected.tolist()


Mask = npt.NDArray[np.bool_]

SHORTEST = 256
"""Tokens up to which all contexts share a bin; every further bin is twice as long."""


@dataclass(frozen=True, slots=True)
class Against:
    """One arm beside the base: points apart, and percent of the base's value.

    ``p`` is of a two-sided test that both are alike, ``p_holm`` the same after Holm's correction
    for all arms of the run; None where it was not tested.
    """

    base: str
    difference: Estimate
    retention: Estimate
    p: float | None = None
    p_holm: float | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """One metric of one arm over the ``n`` examples that it counts; the base is against None."""

    metric: str
    n: int
    estimate: Estimate
    against: Against | None = None


@dataclass(frozen=True, slots=True)
class Part:
    """The results, not tested, on some of the examples.

    They are those of one kind, or "found" and "missed": whether retrieval found evidence.
    """

    label: str
    examples: int
    results: tuple[Result, ...]


@dataclass(frozen=True, slots=True)
class Counters:
    """Sums over the compared questions of one arm.

    Errors are questions without an answer, which count as wrong; unfinished answers ended at the
    limit of their length.
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
    """Median seconds to the first token over contexts of more tokens than ``above``, up to others.

    Cold, nothing was cached; warm, all that the arm can cache was in memory.
    """

    above: int
    up_to: int
    tokens: float
    n: int
    cold_s: float
    warm_s: float


@dataclass(frozen=True, slots=True)
class ArmSummary:
    """All of one arm; speed is empty where it was not measured, cold and warm are over all bins."""

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
    """A run's results, on the examples that every arm has a record of: the compared ones.

    Attributes:
        groups: that they come from, such as conversations; whole ones are resampled.
        missing: records that an unfinished run still lacks, by name of the arm.
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
        """The summary as a JSON object."""
        found = json.loads(TypeAdapter(Summary).dump_json(self))
        return {"format": "rag-windows evaluation summary", "version": 1, **found}

    def dump(self) -> str:
        """The text of a scores.json."""
        return json.dumps(self.as_json(), indent=1) + "\n"


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
    """Summarise the records and timings of arms by their names, wherever they come from."""
    by_arm = [records.get(arm.name, {}) for arm in arms]
    shared = [one for one in task.examples if all(one.key in found for found in by_arm)]
    answers = [[found[one.key] for one in shared] for found in by_arm]
    groups = [one.group for one in shared]
    scored = [task.scores(shared, answered) for answered in answers] if shared else []

    def parts(label: str, mask: Mask, tested: bool = False) -> list[Part]:
        """Of each arm."""
        found = [_results(one, arms, groups, mask, tested) for one in zip(*scored, strict=True)]
        size = int(mask.sum())
        return [Part(label, size, tuple(one[n] for one in found)) for n in range(len(arms))]

    whole = parts("", np.ones(len(shared), dtype=np.bool_), tested=True)
    names = dict.fromkeys(kind for one in shared for kind in one.kinds)
    kinds = [parts(kind, np.array([kind in one.kinds for one in shared])) for kind in names]
    recalls = _recalls(arms, shared, answers)
    split = {
        depth: (parts("found", recall > 0), parts("missed", recall == 0))
        for depth, recall in recalls.items()
    }
    made = []
    for place, arm in enumerate(arms):
        timed = _timed((speeds or {}).get(arm.name, ()))
        made.append(
            ArmSummary(
                name=arm.name,
                label=arm.label,
                top_k=arm.top_k,
                results=whole[place].results,
                kinds=tuple(one[place] for one in kinds),
                retrieval=tuple(one[place] for one in split.get(arm.top_k, ())),
                counters=_counters(answers[place]),
                times=_times(answers[place]),
                speed=_bins(timed),
                cold_s=float(timed["cold_s"].median()),
                warm_s=float(timed["warm_s"].median()),
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
                int(np.isfinite(recall).sum()),
                _mean(recall, groups),
                _mean(np.where(recall > 0, 100.0, recall), groups),
            )
            for depth, recall in recalls.items()
        ),
    )


def _results(
    scores: Sequence[Score], arms: Sequence[Arm], groups: Sequence[str], mask: Mask, tested: bool
) -> list[Result]:
    """One metric of each arm on some of the examples."""
    rows = np.where(mask[:, None, None], np.stack([one.rows for one in scores], axis=1), 0.0)
    sums, formula = group_sums(rows, groups), scores[0].formula
    bases = [base_of(arms, place) for place in range(len(arms))]
    values, drawn = bootstrap(sums, formula)
    p = p_values(sums, bases, formula) if tested else None
    made = []
    for place, (score, base) in enumerate(zip(scores, bases, strict=True)):
        # The dataset's own figure, to the last bit.
        own = estimate(score.value if tested else values[place], drawn[place])
        against = Against(
            arms[base].name,
            estimate(values[place] - values[base], drawn[place] - drawn[base]),
            estimate(percent(values[place], values[base]), percent(drawn[place], drawn[base])),
            *(() if p is None else p[place]),
        )
        # An example that a metric does not count adds nothing at all.
        n = int(rows[:, place].any(axis=1).sum())
        made.append(Result(score.name, n, own, None if base == place else against))
    return made


def _recalls(
    arms: Sequence[Arm], examples: Sequence[Example], answers: Sequence[Sequence[Record]]
) -> dict[int | None, Array]:
    """By depth, percent of each example's evidence; NaN for one without, or that nobody read.

    All arms of a depth got the same ranking, and one that could not hold all of it left out its
    end, so the longest list is the ranking.
    """
    found = {}
    for depth in dict.fromkeys(arm.top_k for arm in arms):
        own = [one for arm, one in zip(arms, answers, strict=True) if arm.top_k == depth]
        recall = np.full(len(examples), np.nan)
        for place, (example, *records) in enumerate(zip(examples, *own, strict=True)):
            read = [one.passages for one in records if one.error is None]
            if example.evidence and read:
                ids = {one.id for one in max(read, key=len)}
                recall[place] = 100 * len(ids & example.evidence) / len(example.evidence)
        if np.isfinite(recall).any():
            found[depth] = recall
    return found


def _mean(values: Array, groups: Sequence[str]) -> Estimate:
    counted = np.isfinite(values)
    rows = np.stack([np.where(counted, values, 0.0), counted], axis=1)
    found, drawn = bootstrap(group_sums(rows, groups)[:, None], ratio)
    return estimate(found[0], drawn[0])


def _counters(records: Sequence[Record]) -> Counters:
    summed = ("windows_encoded", "windows_reused", "prompt_tokens", "cached_tokens")
    return Counters(
        **{name: sum(getattr(one, name) for one in records) for name in summed},
        completion_tokens=sum(one.completion_tokens for one in records),
        left_out_passages=sum(one.left_out for one in records),
        left_out_questions=sum(one.left_out > 0 for one in records),
        errors=sum(one.error is not None for one in records),
        unfinished=sum(one.error is None and one.finish_reason == "length" for one in records),
    )


def _times(records: Iterable[Record]) -> Times | None:
    answered = [(one.encode_s, one.ttft_s, one.total_s) for one in records if one.error is None]
    return Times(*np.median(answered, axis=0).tolist()) if answered else None


def _timed(speeds: Iterable[Speed]) -> pd.DataFrame:
    """A row a context, with the medians of its rounds."""
    rows = [(one.context_tokens, np.median(one.cold_s), np.median(one.warm_s)) for one in speeds]
    return pd.DataFrame(rows, columns=["tokens", "cold_s", "warm_s"], dtype=np.float64)


def _bins(timed: pd.DataFrame) -> tuple[SpeedBin, ...]:
    """Contexts up to 256 tokens, up to 512, up to 1,024 and so on; empty bins are not there."""
    up_to = 2 ** np.ceil(np.log2(timed["tokens"].clip(lower=SHORTEST)))
    return tuple(
        SpeedBin(0 if end == SHORTEST else int(end) // 2, int(end), n=len(one), **one.median())
        for end, one in timed.groupby(up_to)
    )
