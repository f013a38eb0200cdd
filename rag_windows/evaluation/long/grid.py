"""How many passages are read, and where the one that answers stands among them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rag_windows.errors import InputError


@dataclass(frozen=True, slots=True)
class Cell:
    """One number of passages with one place of the needle.

    Attributes:
        size: passages in all.
        index: the needle's, from 0.
        depth: where it was to stand, from 0 (first) to 1 (last); None for a single passage, which
            stands everywhere.
    """

    size: int
    index: int
    depth: float | None

    @property
    def kinds(self) -> tuple[str, ...]:
        """Labels by which results are broken down."""
        if self.depth is None:
            return ("1 passage",)
        return (f"{self.size} passages", f"position {self.depth:.0%}")

    @property
    def key(self) -> str:
        """Unique in a grid."""
        return f"{self.size}/{self.index}"


def grid(sizes: Sequence[int], depths: Sequence[float]) -> tuple[Cell, ...]:
    """All cells, by size and then by place.

    Where two depths mean the same place, as 50% and 75% do among two passages, the nearer one
    names it.

    Raises:
        InputError: no size or depth, one of them twice, or one out of range.
    """
    for name, values in (("numbers of passages", sizes), ("positions", depths)):
        if not values or len(set(values)) < len(values):
            raise InputError(f"{name} must be different, and at least one: not {list(values)}.")
    if min(sizes) < 1:
        raise InputError(f"At least 1 passage is read, not {min(sizes)}.")
    wrong = next((one for one in depths if not 0 <= one <= 1), None)
    if wrong is not None:
        raise InputError(f"A position is between 0 (first) and 1 (last), not {wrong}.")
    cells = []
    for size in sorted(sizes):
        last = size - 1
        if not last:
            cells.append(Cell(1, 0, None))
            continue
        nearest: dict[int, float] = {}
        for depth in sorted(depths):
            # Halves go up, unlike round(), so that steps stay even.
            index = int(depth * last + 0.5)
            known = nearest.get(index)
            if known is None or abs(depth - index / last) < abs(known - index / last):
                nearest[index] = depth
        cells += [Cell(size, index, depth) for index, depth in sorted(nearest.items())]
    return tuple(cells)
