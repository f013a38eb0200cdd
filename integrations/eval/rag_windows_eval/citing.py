"""How right citations are: by attention and by removal, against marked passages and removals."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
from scipy.stats import spearmanr

from rag_windows import Passage, WindowedLM
from rag_windows.calibration import contains
from rag_windows.prefill import complete
from rag_windows.request import Request
from rag_windows.results import Citation, by_mass, carried
from rag_windows_eval.passages import PassagesTask
from rag_windows_eval.run import Answered, Condition, Generating
from rag_windows_eval.run import Asked as AskedExample
from rag_windows_eval.task import Ablation, AnswerRecord, MetricScore, TaskExample

HALVES = 8
"""Random halves of the passages that are left out, unless the user gives another number."""

DROPS = (1, 3, 5)
"""So many of the first passages of a ranking are left out together."""

RANKINGS: Mapping[str, Callable[[Citation], float]] = {
    "mass": lambda one: one.mass,
    "removal": lambda one: -np.inf if one.drop is None else one.drop,
}
"""How much the answer rests on a passage, by each way to cite."""


class CitationsTask(PassagesTask):
    """A file of questions that bring their passages, asked for what their answers rest on."""

    @classmethod
    def read(cls, path: str, *, every_answer: bool = False, **options: Any) -> Self:
        """Read a file; see `PassagesTask.read`.

        Args:
            path: the file.
            every_answer: judge the citations of answers that hold no right one word for word, too,
                as long answers hardly ever do.
            options: those of `PassagesTask.read`.
        """
        task = super().read(path, **options)
        if not every_answer:
            return task
        return replace(task, settings={**task.settings, "every_answer": True})

    def scores(
        self, examples: Sequence[TaskExample], records: Sequence[AnswerRecord]
    ) -> list[MetricScore]:
        """How right the citations are, by attention ("mass") and by removal.

        Of answers that contain a right one, or of every answer: "top ..." is whether the passage
        that a ranking puts first is a right one, for "chance" how often any passage is, and for
        "score" the retriever's best. "precision", "recall" and "f1" compare the passages that are
        named as sources with the right ones. Of all answers: "cited" is whether any passage is
        named; "drop k" is what the answer's log-probability loses in nats without a ranking's
        first k passages, and "lds" the rank correlation of a ranking's sums with log-probabilities
        over random halves, in percent.
        What a method can't measure counts nothing.
        """
        found: dict[str, list[float | None]] = {name: [] for name in _METRICS}
        for example, record in zip(examples, records, strict=True):
            said = [one.text for one in example.references]
            right = any(contains(record.answer, text) for text in said)
            judged = right or bool(self.settings.get("every_answer"))
            values = _values(record, set(example.details["right"]), judged=judged)
            for name, into in found.items():
                into.append(100.0 * right if name == "contains" else values.get(name))
        return [MetricScore.mean(name, values) for name, values in found.items()]


_METRICS = (
    "contains",
    *(f"top_{name}" for name in ("chance", "score", *RANKINGS)),
    *(f"{kind}_{name}" for name in RANKINGS for kind in ("precision", "recall", "f1", "cited")),
    *(f"drop_{k}_{name}" for name in RANKINGS for k in DROPS),
    *(f"lds_{name}" for name in RANKINGS),
)


def _values(record: AnswerRecord, marked: set[Any], *, judged: bool) -> dict[str, float]:
    """The figures of one answer, in percent or nats."""
    values = dict(record.effects)
    # One prompt has no windows, and in a row that won no token a passage has no mass.
    places = [place for place, one in enumerate(record.passages) if one.mass or one.spans]
    read = [record.passages[place] for place in places]
    if not read:
        return values
    citations = [
        Citation(place, one.id, one.mass or 0.0, one.drop, one.supports)
        for place, one in enumerate(record.passages)
    ]
    of_kind = {"mass": by_mass(citations)}
    if any(one.drop is not None for one in citations):
        of_kind["removal"] = carried(citations)
    for name, cited in of_kind.items():
        values[f"cited_{name}"] = 100.0 * bool(cited)
    if not judged or not marked:
        return values
    values["top_chance"] = 100.0 * sum(one.id in marked for one in read) / len(read)
    if all(one.score is not None for one in read):
        best = max(read, key=lambda one: one.score or 0.0)
        values["top_score"] = 100.0 * (best.id in marked)
    for name, cited in of_kind.items():
        first = max((citations[place] for place in places), key=RANKINGS[name])
        values[f"top_{name}"] = 100.0 * (first.id in marked)
        hits = sum(one.id in marked for one in cited)
        precision = hits / len(cited) if cited else 0.0
        recall = hits / len(marked)
        both = precision + recall
        values[f"precision_{name}"] = 100.0 * precision
        values[f"recall_{name}"] = 100.0 * recall
        values[f"f1_{name}"] = 100.0 * (2 * precision * recall / both if both else 0.0)
    return values


@dataclass(frozen=True, slots=True)
class Citing:
    """Answers questions, then measures what their citations are worth; see `CitationsTask`."""

    generating: Generating
    halves: int = HALVES

    def answer(
        self, lm: WindowedLM, condition: Condition, asked: Sequence[AskedExample]
    ) -> list[Answered]:
        """Answer each example by itself."""
        made = []
        for example, passages in asked:
            ((record, texts),) = self.generating.answer(lm, condition, [(example, passages)])
            made.append((self._measured(lm, condition, example, passages, record), texts))
        return made

    def _measured(
        self,
        lm: WindowedLM,
        condition: Condition,
        example: TaskExample,
        passages: Sequence[Passage],
        record: AnswerRecord,
    ) -> AnswerRecord:
        """The record with what the answer loses without several passages at once."""
        drops = {
            place: one.drop
            for place, one in enumerate(record.passages)
            if one.drop is not None and one.spans
        }
        if len(drops) < 2 or not record.tokens:
            return record
        arguments: dict[str, Any] = {
            "query": list(example.messages),
            "passages": passages,
            "method": condition.method,
            "prefix": self.generating.prefix_of(lm),
            "max_new_tokens": self.generating.max_new_tokens,
        }
        engine, request = lm.engine, Request.of(lm.engine, arguments)
        context = complete(request.prefill_for_query())
        read = list(dict.fromkeys(context.groups))
        scores = {
            "mass": {group: record.passages[group].mass or 0.0 for group in read},
            "removal": {group: drops.get(group, 0.0) for group in read},
        }
        first = {
            (name, k): sorted(read, key=lambda group: -own[group])[:k]
            for name, own in scores.items()
            for k in DROPS
            if k < len(read)
        }
        draw = random.Random(f"{self.generating.seed}/{example.key}")
        halves = [draw.sample(read, len(read) // 2) for _ in range(self.halves)]
        halves = halves if len(read) > 2 else []
        found = engine.decoder.chances(
            context, request.parts.query_ids, record.tokens, [(), *first.values(), *halves]
        )
        whole, *sums = (float(one.sum()) for one in found)
        effects = {
            f"drop_{k}_{name}": whole - left
            for (name, k), left in zip(first, sums[: len(first)], strict=True)
        }
        for name, own in scores.items():
            sums_left = [sum(own[group] for group in read if group not in half) for half in halves]
            if len(set(sums_left)) > 1 and len(set(sums[len(first) :])) > 1:
                rank = float(spearmanr(sums_left, sums[len(first) :]).statistic)
                effects[f"lds_{name}"] = 100.0 * rank
        ablations = [
            Ablation(tuple(sorted(half)), logprob)
            for half, logprob in zip(halves, sums[len(first) :], strict=True)
        ]
        return replace(record, effects=effects, ablations=tuple(ablations))
