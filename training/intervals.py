"""Shares with their uncertainty."""

from __future__ import annotations

import math

Z_95 = 1.959963984540054


def wilson(right: int, total: int, z: float = Z_95) -> tuple[float, float]:
    """Wilson's interval of a share (E. B. Wilson, JASA 1927): (low, high) in 0..1.

    Raises:
        ValueError: no trials, or more right ones than trials.
    """
    if total < 1 or not 0 <= right <= total:
        raise ValueError(f"needs 0 <= right <= total and total >= 1, not {right} of {total}")
    share = right / total
    spread = z * z / total
    centre = (share + spread / 2) / (1 + spread)
    half = z / (1 + spread) * math.sqrt(share * (1 - share) / total + spread / total / 4)
    return max(0.0, centre - half), min(1.0, centre + half)
