"""Which demonstrations share a window."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise

from rag_windows.errors import InputError, LimitError


def pack(sizes: Sequence[int], room: int, windows: int | None = None) -> list[range]:
    """Put neighbours into as few windows as hold them, or into so many, all about as full.

    Args:
        sizes: tokens of each demonstration, each at most ``room``.
        room: tokens that a window holds.
        windows: how many windows to fill, instead of the fewest.

    Returns:
        Indices into ``sizes``: ranges that follow each other, none of them empty.

    Raises:
        InputError: more windows than demonstrations, or fewer than one.
        LimitError: so few windows can't hold them.
    """
    if not sizes:
        return []
    if windows is not None and not 1 <= windows <= len(sizes):
        raise InputError(
            f"windows={windows} must be between 1 and the number of demonstrations, {len(sizes)}."
        )
    sums = [0, *accumulate(sizes)]
    fewest = 0
    start = 0
    while start < len(sizes):
        start = bisect_right(sums, sums[start] + room) - 1
        fewest += 1
    count = windows or fewest
    if count < fewest:
        raise LimitError(
            f"{len(sizes)} demonstrations make {sums[-1]} tokens, and a window holds {room}: "
            f"windows={count} are too few, {fewest} would hold them."
        )
    # The first demonstration from which on the last windows hold all the rest.
    earliest = [len(sizes)]
    for _ in range(count):
        earliest.append(bisect_left(sums, sums[earliest[-1]] - room))
    ends = [0]
    for left in range(count - 1, 0, -1):
        ideal = sums[-1] * (count - left) / count
        near = bisect_left(sums, ideal)
        if near and ideal - sums[near - 1] < sums[near] - ideal:
            near -= 1
        furthest = bisect_right(sums, sums[ends[-1]] + room) - 1
        least = max(earliest[left], ends[-1] + 1)
        ends.append(max(least, min(near, furthest, len(sizes) - left)))
    ends.append(len(sizes))
    return [range(a, b) for a, b in pairwise(ends)]
