"""How many examples share a window."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rag_windows.errors import InputError


@dataclass(frozen=True, slots=True)
class Grouping:
    """Examples a window, or windows in all; by default a window holds one example.

    Raises:
        InputError: both are given, or a number below 1.
    """

    examples_per_window: int | None = None
    windows: int | None = None

    def __post_init__(self) -> None:
        given = {
            "examples_per_window": self.examples_per_window,
            "windows": self.windows,
        }
        for name, value in given.items():
            whole = isinstance(value, int) and not isinstance(value, bool) and value >= 1
            if value is not None and not whole:
                raise InputError(f"{name} must be a whole number from 1 on, got {value!r}.")
        if None not in given.values():
            raise InputError(
                "examples_per_window and windows can't both be given; leave one of them out."
            )

    def ends(self, examples: Sequence[int]) -> list[int]:
        """Ends of windows, out of the ends of examples: whole examples, in their order.

        ``windows`` spreads them as evenly as whole examples allow; with fewer examples there are
        fewer windows.
        """
        count = len(examples)
        if self.windows is None:
            each = self.examples_per_window or 1
            return [examples[min(i + each, count) - 1] for i in range(0, count, each)]
        windows = min(self.windows, count)
        return [examples[count * (i + 1) // windows - 1] for i in range(windows)]
