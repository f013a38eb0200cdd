"""One metric of several arms: values with intervals, and each arm against its base."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rag_windows.evaluation.statistics.bootstrap import Bootstrap
from rag_windows.evaluation.statistics.estimate import Estimate
from rag_windows.evaluation.statistics.groups import Groups
from rag_windows.evaluation.statistics.parts import Parts
from rag_windows.evaluation.statistics.permutation import holm, p_values

Masks = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Tested:
    """A p value before and after correction; NaN where an arm has no value."""

    p: float
    holm: float


class Comparison:
    """A metric of several arms on the same examples, and on parts of them.

    Args:
        parts: one an arm, over the same examples in the same order, with the same formula.
        groups: of the examples.
        bases: for each arm the place of the one that it is compared with; its own for a base.
        masks: (sections, examples), which examples a section holds.
    """

    def __init__(
        self, parts: Sequence[Parts], groups: Groups, bases: Sequence[int], masks: Masks
    ) -> None:
        self._arms = len(parts)
        self._bases = tuple(bases)
        self._formula = parts[0].formula
        rows = np.stack([one.array for one in parts], axis=1)
        # An example that a metric does not count adds nothing at all.
        self._counted = masks @ rows.any(axis=2).astype(np.intp)
        sums = [groups.add_up(np.where(mask[:, None, None], rows, 0.0)) for mask in masks]
        self._sums = groups.add_up(rows)
        # All sections in one bootstrap: they have the same draws, which take most of the time.
        self._bootstrap = Bootstrap(np.concatenate(sums, axis=1), self._formula)

    def n(self, arm: int, section: int) -> int:
        """Examples of a section that count for an arm."""
        return int(self._counted[section, arm])

    def value(self, arm: int, section: int) -> Estimate:
        """Percent."""
        return self._bootstrap.value(self._column(arm, section))

    def difference(self, arm: int, section: int) -> Estimate:
        """From the arm's base, percentage points."""
        return self._bootstrap.difference(*self._pair(arm, section))

    def retention(self, arm: int, section: int) -> Estimate:
        """Percent of the base's value; NaN where that is 0."""
        return self._bootstrap.retention(*self._pair(arm, section))

    def tests(self) -> list[Tested | None]:
        """Over all examples, one an arm; None for a base. All arms are one family for Holm."""
        p = [math.nan] * self._arms
        for base in set(self._bases):
            own = [arm for arm in range(self._arms) if self._bases[arm] == base and arm != base]
            found = p_values(self._sums[:, [base, *own]], 0, self._formula)
            for arm, value in zip(own, found[1:], strict=True):
                p[arm] = value
        return [
            None if self._bases[arm] == arm else Tested(*pair)
            for arm, pair in enumerate(zip(p, holm(p), strict=True))
        ]

    def _column(self, arm: int, section: int) -> int:
        return section * self._arms + arm

    def _pair(self, arm: int, section: int) -> tuple[int, int]:
        return self._column(arm, section), self._column(self._bases[arm], section)
