"""Scores of a run, from the records of its conditions. Figures are percent, times seconds.

Questions come in groups, such as turns of a conversation, so whole groups are resampled (A. C.
Davison, D. V. Hinkley, Bootstrap Methods and their Application, 1997, section 3.8) or exchanged
between two methods (E. W. Noreen 1989; S. Riezler, J. T. Maxwell 2005). A group's observation is
the sums of its metric's rows.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from pydantic_core import to_jsonable_python
from scipy import stats

from rag_windows_eval.run import Condition, RunFolder, base_of
from rag_windows_eval.task import (
    AnswerRecord,
    Array,
    Formula,
    MetricScore,
    Task,
    TaskExample,
    ratio,
)

Mask = npt.NDArray[np.bool_]
Summary = dict[str, Any]
"""The object of a scores.json, with `Estimate` for figures and NaN for null; see `summarise`."""

RESAMPLES, PERMUTATIONS, SEED = 2000, 9_999, 20260
MOST_LOST = 0.01
"""With a larger share of draws without a value there is no interval: it would be biased."""

_ELEMENTS = 10_000_000
"""Elements of the arrays that are resampled at once."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure with the ends of its 95% interval; NaN, null in JSON, where there is none."""

    value: float
    low: float = math.nan
    high: float = math.nan

    @property
    def bounded(self) -> bool:
        """Whether there is an interval."""
        return not math.isnan(self.low)


def as_json(summary: Summary) -> Summary:
    """A summary as plain JSON values."""
    return dict(to_jsonable_python(summary, inf_nan_mode="null"))


def summarise(task: Task, folder: RunFolder) -> Summary:
    """Summarise what a run of a task has answered so far.

    Figures are of the ``compared`` examples, of which every condition has a record. ``missing``
    counts the records that an unfinished run still lacks. Each condition has ``results``, one a
    metric, on all of these examples, on those of each kind, and on those for which retrieval
    "found" or "missed" evidence; ``against`` compares them with the condition's base, and is null
    for the base itself. Only those on all examples are tested.
    """
    conditions = folder.manifest.conditions
    stored = [folder.records[condition.name] for condition in conditions]
    shared = [one for one in task.examples if all(one.key in found for found in stored)]
    answers = [[found[one.key] for one in shared] for found in stored]
    groups = [one.group for one in shared]
    scored = [task.scores(shared, answered) for answered in answers] if shared else []

    def parts(label: str, mask: Mask, tested: bool = False) -> list[Summary]:
        """Results of each condition on some of the examples."""
        found = [_results(s, conditions, groups, mask, tested) for s in zip(*scored, strict=True)]
        examples = int(mask.sum())
        return [
            {"label": label, "examples": examples, "results": [one[place] for one in found]}
            for place in range(len(conditions))
        ]

    whole = parts("", np.ones(len(shared), dtype=np.bool_), tested=True)
    names = dict.fromkeys(kind for one in shared for kind in one.kinds)
    kinds = [parts(kind, np.array([kind in one.kinds for one in shared])) for kind in names]
    recalls = _recalls(conditions, shared, answers)
    split = {
        depth: (parts("found", recall > 0), parts("missed", recall == 0))
        for depth, recall in recalls.items()
    }
    return {
        "format": "rag-windows evaluation summary",
        "version": 1,
        "task": task.name,
        "metrics": [one.name for one in scored[0]] if scored else [],
        "examples": len(task.examples),
        "compared": len(shared),
        "groups": len(set(groups)),
        "missing": {
            condition.name: sum(one.key not in found for one in task.examples)
            for condition, found in zip(conditions, stored, strict=True)
        },
        "arms": [
            {
                "name": condition.name,
                "label": condition.label,
                "top_k": condition.top_k,
                "results": whole[place]["results"],
                "kinds": [one[place] for one in kinds],
                "retrieval": [one[place] for one in split.get(condition.top_k, ())],
                **_work(answers[place]),
            }
            for place, condition in enumerate(conditions)
        ],
        "retrieval": [
            {
                "top_k": depth,
                "n": int(np.isfinite(recall).sum()),
                "recall": _mean(recall, groups),
                "hit": _mean(np.where(recall > 0, 100.0, recall), groups),
            }
            for depth, recall in recalls.items()
        ],
    }


def means(parts: Sequence[tuple[Task, RunFolder]]) -> Summary:
    """Mean of the main metrics of several runs with the same conditions; each run counts the same.

    Questions are those that every condition has a record of. Groups are drawn within each run, and
    a draw of the mean is the mean of the runs' draws. ``arms`` are as the results of `summarise`.
    """
    values, drawn, metrics = [], [], []
    conditions = parts[0][1].manifest.conditions
    for task, folder in parts:
        stored = [folder.records[condition.name] for condition in folder.manifest.conditions]
        shared = [one for one in task.examples if all(one.key in found for found in stored)]
        scores = [task.scores(shared, [found[one.key] for one in shared])[0] for found in stored]
        rows = np.stack([one.rows for one in scores], axis=1)
        own = bootstrap(group_sums(rows, [one.group for one in shared]), scores[0].formula)
        values.append(own[0])
        drawn.append(np.broadcast_to(own[1], (len(conditions), RESAMPLES)))
        metrics.append(scores[0].name)
    mean, draws = np.mean(values, axis=0), np.mean(drawn, axis=0)
    found = []
    for place, condition in enumerate(conditions):
        base = base_of(conditions, place)
        retained = percent(mean[place], mean[base]), percent(draws[place], draws[base])
        against = {
            "base": conditions[base].name,
            "difference": estimate(mean[place] - mean[base], draws[place] - draws[base]),
            "retention": estimate(*retained),
        }
        named = {"name": condition.name, "label": condition.label, "top_k": condition.top_k}
        figures = {"estimate": estimate(mean[place], draws[place])}
        found.append(named | figures | {"against": None if base == place else against})
    return {"runs": len(parts), "metric": metrics[0], "arms": found}


def _results(
    scores: Sequence[MetricScore],
    conditions: Sequence[Condition],
    groups: Sequence[str],
    mask: Mask,
    tested: bool,
) -> list[Summary]:
    """One metric of each condition on some of the examples."""
    rows = np.where(mask[:, None, None], np.stack([one.rows for one in scores], axis=1), 0.0)
    sums, formula = group_sums(rows, groups), scores[0].formula
    bases = [base_of(conditions, place) for place in range(len(conditions))]
    values, drawn = bootstrap(sums, formula)
    p = np.full(len(conditions), np.nan)
    for place, base in enumerate(bases):
        if tested and place != base:
            p[place] = p_value(sums[:, place], sums[:, base], formula)
    corrected = holm(p)
    made = []
    for place, (score, base) in enumerate(zip(scores, bases, strict=True)):
        retained = percent(values[place], values[base]), percent(drawn[place], drawn[base])
        against = {
            "base": conditions[base].name,
            "difference": estimate(values[place] - values[base], drawn[place] - drawn[base]),
            "retention": estimate(*retained),
            "p": float(p[place]),
            "p_holm": corrected[place],
        }
        result = {
            "metric": score.name,
            # An example that a metric does not count adds nothing at all.
            "n": int(rows[:, place].any(axis=1).sum()),
            "estimate": estimate(values[place], drawn[place]),
            "against": None if base == place else against,
        }
        made.append(result)
    return made


def group_sums(rows: Array, groups: Sequence[str]) -> Array:
    """Sum rows over the examples of each group: (examples, ...) to (groups, ...)."""
    flat = pd.DataFrame(rows.reshape(len(rows), -1))
    return flat.groupby(list(groups), sort=False).sum().to_numpy().reshape(-1, *rows.shape[1:])


def bootstrap(sums: Array, formula: Formula) -> tuple[Array, Array]:
    """A metric in several columns, such as conditions, and its values for draws of whole groups.

    ``sums`` are (groups, columns, k). Values are (columns,), drawn ones (columns, draws), with the
    same draws for all columns; NaN where there are fewer than two groups.
    """
    values = formula(sums.sum(axis=0))
    if len(sums) < 2:
        return values, np.full((len(values), 1), np.nan)

    def statistic(drawn: Array, axis: int) -> Array:
        return formula(np.moveaxis(drawn.sum(axis=axis), 1, -1))

    with warnings.catch_warnings(), np.errstate(invalid="ignore"):
        # Of columns without a value, whose intervals are not used.
        warnings.simplefilter("ignore")
        found = stats.bootstrap(
            (np.moveaxis(sums, 0, -1),),
            statistic,
            axis=-1,
            n_resamples=RESAMPLES,
            batch=max(1, _ELEMENTS // sums.size),
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
        return Estimate(value=value)
    low, high = np.percentile(np.round(finite, 10) + 0.0, (2.5, 97.5))
    return Estimate(value=value, low=low, high=high)


def percent(values: Any, bases: Any) -> Array:
    """Values in percent of others; NaN where those are 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(bases == 0, np.nan, 100 * values / bases)


def p_value(own: Array, base: Array, formula: Formula) -> float:
    """Two-sided p of two conditions' sums, (groups, k); NaN where one of them has no value.

    If methods were alike, answers to a group could be exchanged. Few exchanges are all computed;
    else some are drawn and the observed one is added (B. Phipson, G. K. Smyth 2010), so p is not 0.
    """

    def difference(first: Array, second: Array, axis: int) -> Array:
        found = np.abs(formula(first.sum(axis=axis)) - formula(second.sum(axis=axis)))
        # What can't be computed for an exchange counts against a difference.
        return np.nan_to_num(np.round(found, 9), nan=np.finfo(float).max)

    if np.isnan(formula(own.sum(axis=0)) - formula(base.sum(axis=0))):
        return math.nan
    if len(own) < 2:
        return 1.0
    found = stats.permutation_test(
        (own.T, base.T),
        difference,
        permutation_type="samples",
        alternative="greater",
        n_resamples=PERMUTATIONS,
        batch=250,
        axis=-1,
        vectorized=True,
        rng=np.random.default_rng(SEED),
    )
    return float(found.pvalue)


def holm(p: Array) -> list[float]:
    """S. Holm's step-down correction (1979) of one family; NaN stays NaN and is no member.

    scipy has corrections of the false discovery rate only.
    """
    order, corrected = np.argsort(p)[: np.isfinite(p).sum()], p.copy()
    steps = np.maximum.accumulate(p[order] * np.arange(len(order), 0, -1))
    corrected[order] = np.minimum(1.0, steps)
    return corrected.tolist()


def _recalls(
    conditions: Sequence[Condition],
    examples: Sequence[TaskExample],
    answers: Sequence[Sequence[AnswerRecord]],
) -> dict[int | None, Array]:
    """By depth, recall of each example's evidence in percent; NaN without evidence or answer.

    The longest list of a depth is its ranking: a condition that could not hold it left out the end.
    """
    found = {}
    for depth in dict.fromkeys(each.top_k for each in conditions):
        own = [one for each, one in zip(conditions, answers, strict=True) if each.top_k == depth]
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


def _work(records: Sequence[AnswerRecord]) -> Summary:
    """Sums over all questions; seconds are medians over the answers as they came.

    Unfinished answers reached their limit. Cold ones found no window in the cache, warm ones all;
    where first tokens were timed on purpose, only these count, and ``timed`` is their number.
    """
    names = [field.name for field in fields(AnswerRecord)]
    found = pd.DataFrame([asdict(one) for one in records], columns=names)
    answered = found[found["error"].isna()]
    first, left_out = answered["ttft_s"], found["left_out"]
    encoded, reused = answered["windows_encoded"], answered["windows_reused"]
    timed = answered[answered["warm_s"].notna()]
    cold, warm = first[reused == 0], first[(encoded == 0) & (reused > 0)]
    if len(timed):
        cold, warm = timed["ttft_s"], timed["warm_s"]
    seconds = answered[["encode_s", "ttft_s", "total_s"]].median()
    tokens = ["prompt_tokens", "cached_tokens", "completion_tokens"]
    sums = found[["windows_encoded", "windows_reused", *tokens]].sum()
    return {
        "counters": {
            **sums.astype(int).to_dict(),
            "left_out_passages": int(left_out.sum()),
            "left_out_questions": int((left_out > 0).sum()),
            "errors": len(found) - len(answered),
            "unfinished": int((answered["finish_reason"] == "length").sum()),
        },
        "times": seconds.to_dict() if len(answered) else None,
        "cold_s": cold.median(),
        "warm_s": warm.median(),
        "timed": len(timed),
    }
