"""Where windows stand: the position of each one's first token."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Literal

Alignment = Literal["left", "right", "in order"]


def window_starts(alignment: Alignment, first: int, lengths: Sequence[int]) -> list[int]:
    """Position of each window's first token.

    Args:
        alignment: "left": every window starts at ``first``; "right": every window ends where the
            longest does that starts there; "in order": each starts where the one before it ends.
        first: the prefix's length.
        lengths: tokens of each window.
    """
    if alignment == "left":
        return [first] * len(lengths)
    if alignment == "right":
        longest = max(lengths, default=0)
        return [first + longest - length for length in lengths]
    return list(accumulate(lengths[:-1], initial=first)) if lengths else []
