"""The figures of every metric, on all examples and on parts of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from rag_windows.evaluation.example import Example
from rag_windows.evaluation.statistics.comparing import Comparison
from rag_windows.evaluation.statistics.estimate import Estimate
from rag_windows.evaluation.statistics.groups import Groups
from rag_windows.evaluation.statistics.parts import Parts
from rag_windows.evaluation.summary import Against, Part, Result
from rag_windows.evaluation.task import Score


@dataclass(frozen=True, slots=True)
class Section:
    """Some of the examples.

    Attributes:
        label: what they have in common.
        mask: which they are, one entry an example.
    """

    label: str
    mask: tuple[bool, ...]


def kind_sections(examples: Sequence[Example]) -> list[Section]:
    """One a kind, in the order in which kinds first come; an example may be in several."""
    kinds = dict.fromkeys(kind for example in examples for kind in example.kinds)
    return [Section(kind, tuple(kind in one.kinds for one in examples)) for kind in kinds]


class MetricFigures:
    """One metric of all arms.

    Args:
        scores: one an arm, on the same examples.
        names: of the arms.
        bases: for each arm the place of the one that it is compared with.
        groups: of the examples, of which there is at least one.
        sections: parts of the examples.
    """

    def __init__(
        self,
        scores: Sequence[Score],
        names: Sequence[str],
        bases: Sequence[int],
        groups: Groups,
        sections: Sequence[Section],
    ) -> None:
        self._scores = scores
        self._names = names
        self._bases = bases
        self._compared: Comparison | None = None
        parts = [_parts(score) for score in scores]
        known = [one for one in parts if one is not None]
        if len(known) == len(parts):
            everything = np.ones((1, len(groups.numbers)), dtype=np.bool_)
            masks = np.array([one.mask for one in sections], dtype=np.bool_)
            masks = np.concatenate([everything, masks.reshape(len(sections), everything.size)])
            self._compared = Comparison(known, groups, bases, masks)
            self._tests = self._compared.tests()

    def whole(self, arm: int) -> Result:
        """On all examples, tested."""
        score = self._scores[arm]
        if self._compared is None:
            return self._untested(arm)
        found = self._result(arm, 0, self._compared)
        # The dataset's own figure, to the last bit.
        found = replace(found, estimate=replace(found.estimate, value=score.value))
        test = self._tests[arm]
        if found.against is None or test is None:
            return found
        return replace(found, against=replace(found.against, p=test.p, p_holm=test.holm))

    def part(self, arm: int, section: int) -> Result:
        """On a section, not tested."""
        if self._compared is None:
            return Result(self._scores[arm].name, 0, Estimate(math.nan))
        return self._result(arm, section + 1, self._compared)

    def _result(self, arm: int, section: int, compared: Comparison) -> Result:
        against = None
        if self._bases[arm] != arm:
            against = Against(
                base=self._names[self._bases[arm]],
                difference=compared.difference(arm, section),
                retention=compared.retention(arm, section),
            )
        n, value = compared.n(arm, section), compared.value(arm, section)
        return Result(self._scores[arm].name, n, value, against)

    def _untested(self, arm: int) -> Result:
        score, base = self._scores[arm], self._scores[self._bases[arm]]
        against = None
        if self._bases[arm] != arm:
            kept = 100 * score.value / base.value if base.value else math.nan
            against = Against(
                self._names[self._bases[arm]], Estimate(score.value - base.value), Estimate(kept)
            )
        return Result(score.name, len(score.values), Estimate(score.value), against)


def parts_of(
    figures: Sequence[MetricFigures], arm: int, sections: Sequence[Section], first: int = 0
) -> tuple[Part, ...]:
    """An arm's results on sections that follow each other.

    Args:
        figures: one a metric.
        arm: its place.
        sections: those wanted.
        first: place of the first of them among all that the figures were made with.
    """
    return tuple(
        Part(
            label=one.label,
            examples=sum(one.mask),
            results=tuple(metric.part(arm, first + place) for metric in figures),
        )
        for place, one in enumerate(sections)
    )


def _parts(score: Score) -> Parts | None:
    """None for a metric that is known as a whole alone."""
    if score.parts is not None:
        return score.parts
    no_mean = all(one is None for one in score.values) and not math.isnan(score.value)
    return None if no_mean else Parts.of_mean(score.values)
