"""Which examples are drawn together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rag_windows.evaluation.statistics.parts import Array


@dataclass(frozen=True, slots=True, eq=False)
class Groups:
    """The group of each example, by number.

    Attributes:
        numbers: (examples,), from 0.
        count: of different groups.
    """

    numbers: npt.NDArray[np.intp]
    count: int

    @classmethod
    def of(cls, names: Sequence[str]) -> Groups:
        """From one name an example; groups have the order in which they come."""
        found: dict[str, int] = {}
        numbers = [found.setdefault(name, len(found)) for name in names]
        return cls(np.array(numbers, dtype=np.intp), len(found))

    def add_up(self, rows: Array) -> Array:
        """(examples, ...) to (groups, ...)."""
        sums = np.zeros((self.count, *rows.shape[1:]))
        np.add.at(sums, self.numbers, rows)
        return sums
