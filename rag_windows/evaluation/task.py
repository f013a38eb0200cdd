"""Questions with right answers, what a dataset tells about itself, and a metric of answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from rag_windows.evaluation.record import Record
from rag_windows.passage import Passage

Array = npt.NDArray[np.float64]
Formula = Callable[[Array], Array]


@dataclass(frozen=True, slots=True)
class Reference:
    """One right answer, the dataset's name for its sort, and ids of the passages it rests on."""

    text: str
    kind: str | None = None
    evidence: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Example:
    """One question with its right answers.

    Attributes:
        key: unique in the dataset, and the same on every reading of it.
        messages: the conversation, ``{"role": ..., "content": ...}`` each; the last one asks.
        references: any of them is right.
        group: what is resampled together: the conversation that the question belongs to, or the
            question itself.
        kinds: labels by which results are broken down; empty for none.
        passages: those that the dataset brings, best first; None where they are retrieved.
        choices: the answers to choose from; empty where the answer is written freely.
        details: what the dataset's own metric or file format needs beside.
    """

    key: str
    messages: tuple[Mapping[str, str], ...]
    references: tuple[Reference, ...]
    group: str
    kinds: tuple[str, ...] = ()
    passages: tuple[Passage, ...] | None = None
    choices: tuple[str, ...] = ()
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def question(self) -> str:
        """What is asked last."""
        return self.messages[-1]["content"]

    @property
    def conversation(self) -> Sequence[Mapping[str, str]]:
        """The messages as the data have them, before a style worded them as an instruction."""
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
class Score:
    """One metric of one arm in percent, as sums over examples: it can be had for any draw of them.

    Attributes:
        value: NaN where no example counts.
        values: one an example; None where the metric does not count it or is no mean over examples.
        rows: (examples, k), what is added up; zeros for an example that does not count.
        formula: (..., k) sums to (...) percent; NaN where there is nothing to divide by.
    """

    name: str
    value: float
    values: tuple[float | None, ...]
    rows: Array
    formula: Formula = ratio

    @classmethod
    def mean(cls, name: str, values: Sequence[float | None]) -> Score:
        """The mean of those values that are not None."""
        counted = [one for one in values if one is not None]
        value = sum(counted) / len(counted) if counted else float("nan")
        return cls(name, value, tuple(values), mean_rows(values))

    @classmethod
    def of_sums(cls, name: str, rows: Array, formula: Formula) -> Score:
        """A metric that is no mean over examples."""
        value = float(formula(rows.sum(axis=0))) if len(rows) else float("nan")
        return cls(name, value, (None,) * len(rows), rows, formula)


def mean_rows(values: Sequence[float | None]) -> Array:
    """What a mean adds up: (examples, 2), each value with 1, or zeros for None."""
    rows = [(0.0, 0.0) if one is None else (float(one), 1.0) for one in values]
    return np.array(rows, dtype=np.float64).reshape(-1, 2)


class Task(Protocol):
    """A dataset, ready to be asked."""

    @property
    def name(self) -> str:
        """Such as "inscit" or "chatrag/doc2dial"; stands in the manifest and the report."""

    @property
    def examples(self) -> Sequence[Example]:
        """In the order of the file, with different keys."""

    @property
    def pool(self) -> Sequence[Passage] | None:
        """What a retriever searches; None where every example brings its passages."""

    @property
    def settings(self) -> Mapping[str, Any]:
        """What the answers depend on, for the manifest: digests of the files, options. JSON."""

    @property
    def prefix(self) -> str | None:
        """The instruction before the passages, unless the user gives another."""

    @property
    def max_new_tokens(self) -> int:
        """Length of an answer at most, unless the user gives another."""

    @property
    def metrics(self) -> Sequence[str]:
        """Names of what `scores` gives, the main one first."""

    def scores(self, examples: Sequence[Example], records: Sequence[Record]) -> list[Score]:
        """Score one arm's records, one an example in the same order; an error counts as ""."""
