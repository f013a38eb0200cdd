"""What a run found: scores.json, from the records of its arms. Figures are percent, times seconds.

Questions come in groups that go together, as the turns of a conversation do, so whole groups are
drawn again (A. C. Davison, D. V. Hinkley, Bootstrap Methods and their Application, 1997, section
3.8) or exchanged between two methods (E. W. Noreen 1989; S. Riezler, J. T. Maxwell 2005). A group's
observation is the sums of its metric's rows.
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

from rag_windows_eval.run import Arm, RunFolder, base_of
from rag_windows_eval.task import Array, Example, Formula, Record, Score, Task, ratio

Mask = npt.NDArray[np.bool_]
Summary = dict[str, Any]
"""The object of a scores.json, with `Estimate` for figures and NaN for null; see `summarise`."""

RESAMPLES, PERMUTATIONS, SEED = 2000, 9_999, 20260
MOST_LOST = 0.01
"""Share of draws without a value above which there is no interval: the rest would be a choice."""

_ELEMENTS = 10_000_000
"""Of the arrays that are resampled at once."""


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

    Figures are of the ``compared`` examples: those that every arm has a record of. ``missing``
    counts the records that an unfinished run still lacks. Each arm has ``results``, one a metric,
    on all of these examples, on those of each kind, and on those for which retrieval "found" or
    "missed" evidence; ``against`` tells them from the arm's base, and is null for the base itself.
    Only those on all examples are tested.
    """
    arms = folder.manifest.arms
    kept = [folder.records[arm.name] for arm in arms]
    shared = [one for one in task.examples if all(one.key in found for found in kept)]
    answers = [[found[one.key] for one in shared] for found in kept]
    groups = [one.group for one in shared]
    scored = [task.scores(shared, answered) for answered in answers] if shared else []

    def parts(label: str, mask: Mask, tested: bool = False) -> list[Summary]:
        """Of each arm."""
        found = [_results(one, arms, groups, mask, tested) for one in zip(*scored, strict=True)]
        examples = int(mask.sum())
        return [
            {"label": label, "examples": examples, "results": [one[place] for one in found]}
            for place in range(len(arms))
        ]

    whole = parts("", np.ones(len(shared), dtype=np.bool_), tested=True)
    names = dict.fromkeys(kind for one in shared for kind in one.kinds)
    kinds = [parts(kind, np.array([kind in one.kinds for one in shared])) for kind in names]
    recalls = _recalls(arms, shared, answers)
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
            arm.name: sum(one.key not in found for one in task.examples)
            for arm, found in zip(arms, kept, strict=True)
        },
        "arms": [
            {
                "name": arm.name,
                "label": arm.label,
                "top_k": arm.top_k,
                "results": whole[place]["results"],
                "kinds": [one[place] for one in kinds],
                "retrieval": [one[place] for one in split.get(arm.top_k, ())],
                **_work(answers[place]),
            }
            for place, arm in enumerate(arms)
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
    """Mean of the main metrics of several runs with the same arms, each run counting the same.

    Questions are those that every arm has a record of. Groups are drawn within each run, and a draw
    of the mean is that of the runs' draws. ``arms`` are as the results of `summarise`.
    """
    values, drawn, metrics = [], [], []
    arms = parts[0][1].manifest.arms
    for task, folder in parts:
        kept = [folder.records[arm.name] for arm in folder.manifest.arms]
        shared = [one for one in task.examples if all(one.key in found for found in kept)]
        scores = [task.scores(shared, [found[one.key] for one in shared])[0] for found in kept]
        rows = np.stack([one.rows for one in scores], axis=1)
        own = bootstrap(group_sums(rows, [one.group for one in shared]), scores[0].formula)
        values.append(own[0])
        drawn.append(np.broadcast_to(own[1], (len(arms), RESAMPLES)))
        metrics.append(scores[0].name)
    mean, draws = np.mean(values, axis=0), np.mean(drawn, axis=0)
    found = []
    for place, arm in enumerate(arms):
        base = base_of(arms, place)
        kept_of, drawn_of = percent(mean[place], mean[base]), percent(draws[place], draws[base])
        against = {
            "base": arms[base].name,
            "difference": estimate(mean[place] - mean[base], draws[place] - draws[base]),
            "retention": estimate(kept_of, drawn_of),
        }
        figure = estimate(mean[place], draws[place])
        told = {"name": arm.name, "label": arm.label, "top_k": arm.top_k, "estimate": figure}
        found.append(told | {"against": None if base == place else against})
    return {"runs": len(parts), "metric": metrics[0], "arms": found}


def _results(
    scores: Sequence[Score],
    arms: Sequence[Arm],
    groups: Sequence[str],
    mask: Mask,
    tested: bool,
) -> list[Summary]:
    """One metric of each arm on some of the examples."""
    rows = np.where(mask[:, None, None], np.stack([one.rows for one in scores], axis=1), 0.0)
    sums, formula = group_sums(rows, groups), scores[0].formula
    bases = [base_of(arms, place) for place in range(len(arms))]
    values, drawn = bootstrap(sums, formula)
    p = np.full(len(arms), np.nan)
    for place, base in enumerate(bases):
        if tested and place != base:
            p[place] = p_value(sums[:, place], sums[:, base], formula)
    corrected = holm(p)
    made = []
    for place, (score, base) in enumerate(zip(scores, bases, strict=True)):
        kept, drawn_kept = percent(values[place], values[base]), percent(drawn[place], drawn[base])
        against = {
            "base": arms[base].name,
            "difference": estimate(values[place] - values[base], drawn[place] - drawn[base]),
            "retention": estimate(kept, drawn_kept),
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
    """(examples, ...) to (groups, ...): what the examples of each group add up to."""
    flat = pd.DataFrame(rows.reshape(len(rows), -1))
    return flat.groupby(list(groups), sort=False).sum().to_numpy().reshape(-1, *rows.shape[1:])


def bootstrap(sums: Array, formula: Formula) -> tuple[Array, Array]:
    """A metric in several columns, such as arms, and its values for draws of whole groups.

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
    """Two-sided p of two arms' sums, (groups, k); NaN where one of them has no value.

    If two methods were alike, their answers to a group's questions could as well have been
    exchanged. Exact where there are few ways to exchange; else some are drawn, and the observed one
    counts beside them (B. Phipson, G. K. Smyth 2010), so that p is never 0.
    """

    def apart(first: Array, second: Array, axis: int) -> Array:
        found = np.abs(formula(first.sum(axis=axis)) - formula(second.sum(axis=axis)))
        # What can't be computed for an exchange counts against a difference.
        return np.nan_to_num(np.round(found, 9), nan=np.finfo(float).max)

    if np.isnan(formula(own.sum(axis=0)) - formula(base.sum(axis=0))):
        return math.nan
    if len(own) < 2:
        return 1.0
    found = stats.permutation_test(
        (own.T, base.T),
        apart,
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


def _work(records: Sequence[Record]) -> Summary:
    """Sums over all questions; seconds are medians over the answers as they came.

    Unfinished answers reached their limit. Cold ones found no window in the cache, warm ones all;
    where first tokens were timed on purpose, these times alone count, of so many ``timed``.
    """
    names = [field.name for field in fields(Record)]
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
