"""The tables of benchmarks/quality.py as Markdown, and their figures as JSON."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from rag_windows_eval.summary import RESAMPLES, SEED, Estimate, estimate
from rag_windows_eval.summary import percent as percent_of

BASE = "sequential"
TRAINED = 8
"""The most passages that the readers were trained with."""

Formula = Callable[[NDArray[np.float64]], NDArray[np.float64]]
"""Of what is right: (..., 4) counts of "neither", "the base alone", "the method alone", "both"."""


def retention(counts: NDArray[np.float64]) -> NDArray[np.float64]:
    """Right answers in percent of the base's."""
    return np.asarray(percent_of(counts[..., 2:].sum(axis=-1), counts[..., 1::2].sum(axis=-1)))


def right_share(counts: NDArray[np.float64]) -> NDArray[np.float64]:
    """Right answers in percent of the questions."""
    return np.asarray(percent_of(counts[..., 2:].sum(axis=-1), counts.sum(axis=-1)))


def difference(counts: NDArray[np.float64]) -> NDArray[np.float64]:
    """Right answers in percent of the questions, less those of the base."""
    return np.asarray(percent_of(counts[..., 2] - counts[..., 1], counts.sum(axis=-1)))


def estimated(right: str, base: str | None = None, formula: Formula | None = None) -> Estimate:
    """A figure of answers, ``1`` where one is right, with a percentile interval.

    It is the bootstrap over questions, both methods' answers to one drawn together; questions that
    only one of them has been asked are left out. Without a base it is the share of right answers,
    with one their percentage of the base's, unless a formula says otherwise.
    """
    pairs = [2 * int(a) + int(b) for a, b in zip(right, base or right, strict=False)]
    counts = np.bincount(pairs, minlength=4)
    formula = formula or (right_share if base is None else retention)
    # Resampled questions differ only in how many of each of the four kinds there are.
    drawn = np.random.default_rng(SEED).multinomial(len(pairs), counts / len(pairs), RESAMPLES)
    return estimate(formula(counts.astype(np.float64)), formula(drawn.astype(np.float64)))


def interval(found: Estimate, signed: bool = False) -> str:
    """The ends of an interval in brackets."""
    if math.isnan(found.low):
        return ""
    form = "+.1f" if signed else ".1f"
    low, high = f"{found.low:{form}}", f"{found.high:{form}}"
    return f" ({low} to {high})".replace("-", "−") if signed else f" ({low}–{high})"


def percent(right: str, base: str | None = None) -> str:
    """An estimate and its interval."""
    found = estimated(right, base)
    return f"{found.value:.1f}{interval(found)}"


def arrow(right: str, base: str | None) -> str:
    """Whether the whole interval of the difference to the base is on one side of zero."""
    if base is None or right == base:
        return ""
    gain = estimated(right, base, difference)
    return " ↑" if gain.low > 0 else " ↓" if gain.high < 0 else ""


@dataclass(frozen=True, slots=True)
class Cell:
    """What one method got right of the questions of a task over so many passages.

    Attributes:
        asked: the method with its numbers, and the header where it is another one.
        right, cited, written, blind, again, cached: see `benchmarks.quality`.
    """

    model: str
    task: str
    passages: int
    label: str
    asked: str
    right: str
    cited: str
    written: str
    blind: float
    again: float
    cached: bool


class Figures:
    """All cells, and what is estimated from them, each once.

    Args:
        cells: in any order.
        tasks: names of tasks in the order in which they are shown; so are the labels.
        cited_task: the task of whose questions one passage's title is in the question.
        base: label of the row with which the others are compared.
    """

    def __init__(
        self,
        cells: Sequence[Cell],
        tasks: Sequence[str],
        labels: Sequence[str],
        cited_task: str,
        base: str = BASE,
    ) -> None:
        self._cited_task, self._base_label = cited_task, base
        order = {name: place for place, name in enumerate([*tasks, *labels])}
        self.cells = sorted(
            cells, key=lambda one: (order[one.task], one.model, order[one.label], one.passages)
        )
        self._base = {
            (one.model, one.task, one.passages): one.right for one in cells if one.label == base
        }
        self.figures = [self._figure(one) for one in self.cells]

    def _figure(self, cell: Cell) -> dict[str, Any]:
        base = None
        if cell.label != self._base_label:
            base = self._base.get((cell.model, cell.task, cell.passages))
        asked, marks = cell.written.replace("-", ""), cell.cited.replace("-", "")
        against = None if base is None else estimated(cell.right, base, difference)
        return {
            "model": cell.model,
            "task": cell.task,
            "passages": cell.passages,
            "label": cell.label,
            "asked": cell.asked,
            "questions": len(cell.right),
            "right": estimated(cell.right),
            "difference": against,
            "retention": None if base is None else estimated(cell.right, base),
            "mark": "" if base is None else arrow(cell.right, base).strip(),
            "blind": 100 * cell.blind,
            "again": 100 * cell.again,
            "cached": cell.cached,
            "written": len(asked),
            "written_alike": asked.count("1"),
            "cited": estimated(marks) if marks and cell.task == self._cited_task else None,
        }

    def as_json(self) -> list[dict[str, Any]]:
        """Every cell's figures; an interval is [value, low, high], null where there is none."""

        def plain(value: Any) -> Any:
            if not isinstance(value, Estimate):
                return value
            ends = value.value, value.low, value.high
            return [None if math.isnan(one) else round(one, 3) for one in ends]

        return [{name: plain(value) for name, value in one.items()} for one in self.figures]

    def markdown(self) -> str:
        """A table for each task, what is kept of sequential's, citations."""
        parts = [self._task(*section) for section in self._sections()]
        kept = [
            {**one, "section": f"{one['task']}, `{one['model']}`"}
            for one in self.figures
            if one["passages"] == TRAINED and one["retention"] is not None
        ]
        if kept:
            shown = _grid(kept, f"percent of {self._base_label}", "section", _retained)
            parts.append(
                f"### Of the right answers of {self._base_label}, {TRAINED} passages\n\n{shown}"
            )
        cited = [one for one in self.figures if one["cited"] is not None]
        for model in dict.fromkeys(one["model"] for one in cited):
            own = [one for one in cited if one["model"] == model]
            shown = _grid(own, model, "passages", lambda one: _with_interval(one["cited"]))
            parts.append(
                "### Right answers whose most attended passage states them\n\n"
                f"Of those that were written token by token.\n\n{shown}"
            )
        return "\n".join(parts)

    def _sections(self) -> Iterator[tuple[str, str, list[dict[str, Any]]]]:
        places = dict.fromkeys((one["task"], one["model"]) for one in self.figures)
        for task, model in places:
            own = [one for one in self.figures if (one["task"], one["model"]) == (task, model)]
            yield task, model, own

    def _task(self, task: str, model: str, own: list[dict[str, Any]]) -> str:
        counts = sorted({one["questions"] for one in own})
        asked = f"{counts[0]:,}" if len(counts) == 1 else f"{counts[0]:,} to {counts[-1]:,}"
        written, alike = (sum(one[name] for one in own) for name in ("written", "written_alike"))
        again = {
            label: {
                "encoded again": f"{np.mean([one['again'] for one in rows]):.0f}%",
                "kept": "yes" if all(one["cached"] for one in rows) else "no",
            }
            for label in dict.fromkeys(one["label"] for one in own)
            if (rows := [one for one in own if one["label"] == label])
        }
        table = _grid(own, "method", "passages", _accuracy, again)
        blind = {one["passages"]: one["blind"] for one in own}
        last = " | ".join(f"{blind[one]:.0f}" for one in sorted(blind))
        return (
            f"### {task}, `{model}`\n\n{asked} questions a cell. {alike:,} of {written:,} answers "
            f"that were written token by token are right or wrong as measured.\n\n"
            f"{table}| *blind baseline* | {last} | | |\n"
        )


def _with_interval(found: Estimate) -> str:
    return f"{found.value:.1f}{interval(found)}"


def _accuracy(one: Mapping[str, Any]) -> str:
    """Percent right with its interval, or with that of the difference to the base, in points."""
    if one["difference"] is None:
        return _with_interval(one["right"])
    mark = f" {one['mark']}" if one["mark"] else ""
    return f"{one['right'].value:.1f}{mark}{interval(one['difference'], signed=True)}"


def _retained(one: Mapping[str, Any]) -> str:
    mark = f" {one['mark']}" if one["mark"] else ""
    return f"{one['retention'].value:.1f}{mark}{interval(one['retention'])}"


def _grid(
    own: Sequence[dict[str, Any]],
    head: str,
    columns: str,
    text: Callable[[Mapping[str, Any]], str],
    more: Mapping[str, Mapping[str, str]] | None = None,
) -> str:
    """A Markdown table with a row a method, in their order, and a text for each cell."""
    names = list(dict.fromkeys(one[columns] for one in own))
    names = sorted(names) if columns == "passages" else names
    rows: dict[str, dict[Any, str]] = {}
    for one in own:
        rows.setdefault(one["label"], {})[one[columns]] = text(one)
    for label, row in rows.items():
        row.update((more or {}).get(label, {}))
    extra = list(next(iter(more.values()))) if more else []
    shown = pd.DataFrame.from_dict(rows, orient="index").reindex(columns=[*names, *extra])
    return str(shown.fillna("").rename_axis(head).to_markdown()) + "\n"
