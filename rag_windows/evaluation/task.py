"""What a dataset tells about itself, so that one runner and one report serve all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from rag_windows.evaluation.example import Example
from rag_windows.evaluation.record import Record
from rag_windows.passage import Passage

if TYPE_CHECKING:
    from rag_windows.evaluation.statistics.parts import Parts


@dataclass(frozen=True, slots=True)
class Score:
    """One metric of one arm.

    Attributes:
        name: such as "response_f1".
        value: percent, 0 to 100.
        values: percent for each example in order; None for one that this metric does not count, and
            for all of them where the metric is no mean over examples, as BLEU is not.
        parts: of a metric that is no mean over examples, what it is computed from; without them it
            has no interval and no test.
    """

    name: str
    value: float
    values: tuple[float | None, ...]
    parts: Parts | None = None

    @classmethod
    def mean(cls, name: str, values: Sequence[float | None]) -> Score:
        """The mean of those that count; NaN if none does."""
        counted = [one for one in values if one is not None]
        value = sum(counted) / len(counted) if counted else float("nan")
        return cls(name, value, tuple(values))


class Task(Protocol):
    """A dataset, ready to be asked."""

    @property
    def name(self) -> str:
        """Such as "inscit" or "chatrag/doc2dial"; stands in the manifest and the report."""
        ...

    @property
    def examples(self) -> Sequence[Example]:
        """In the order of the file, with different keys."""
        ...

    @property
    def pool(self) -> Sequence[Passage] | None:
        """What a retriever searches; None where every example brings its passages."""
        ...

    @property
    def settings(self) -> Mapping[str, Any]:
        """What the answers depend on, for the manifest: digests of the files, options. JSON."""
        ...

    @property
    def prefix(self) -> str | None:
        """The instruction before the passages, unless the user gives another."""
        ...

    @property
    def max_new_tokens(self) -> int:
        """Length of an answer at most, unless the user gives another."""
        ...

    @property
    def metrics(self) -> Sequence[str]:
        """Names of what `scores` gives, the main one first."""
        ...

    def scores(self, examples: Sequence[Example], records: Sequence[Record]) -> list[Score]:
        """Score one arm's records, one an example in the same order; an error counts as ""."""
        ...
