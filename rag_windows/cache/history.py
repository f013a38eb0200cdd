"""How often each key was asked for, lately: decayed counts over several memory lengths."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence


class History:
    """Decayed numbers of uses of the keys seen last, whether they are held or not.

    A use counts 1 and loses half of that every half-life. The log2 of the sum, relative to a moving
    origin (the clock), only changes when the key is used again, so a heap of such levels stays in
    order without being touched (LRFU: Lee et al., IEEE Trans. Computers 50(12), 2001).

    Args:
        half_lives: each in units of the period given to `use`.
        limit: keys remembered; those not used for longest are forgotten.
    """

    def __init__(self, half_lives: Sequence[float], limit: int) -> None:
        self._half_lives = tuple(half_lives)
        self._limit = limit
        self._levels: OrderedDict[str, list[float]] = OrderedDict()
        self.clocks = [0.0] * len(self._half_lives)

    def __len__(self) -> int:
        return len(self._levels)

    def use(self, key: str, period: float, times: float = 1.0) -> list[float]:
        """Count a use and let time pass by one use.

        Args:
            key: what was asked for.
            period: length of the half-lives' unit, in uses of any key.
            times: counts as so many uses at once.

        Returns:
            One level per half-life.
        """
        clocks = self.clocks
        for index, half_life in enumerate(self._half_lives):
            clocks[index] += 1.0 / (half_life * period)
        levels = self._levels.get(key)
        if levels is None:
            if len(self._levels) >= self._limit:
                self._levels.popitem(last=False)
            levels = [clock + math.log2(times) for clock in clocks]
            self._levels[key] = levels
            return levels
        self._levels.move_to_end(key)
        for index, clock in enumerate(clocks):
            levels[index] = clock + math.log2(times + math.exp2(levels[index] - clock))
        return levels

    def levels(self, key: str) -> Sequence[float]:
        """One level per half-life; that of a single use now if the key isn't remembered."""
        return self._levels.get(key, self.clocks)

    def by_key(self, index: int) -> dict[str, float]:
        """The levels of all keys remembered for one half-life."""
        return {key: levels[index] for key, levels in self._levels.items()}
