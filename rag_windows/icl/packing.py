"""How many demonstrations stand in a window, and in how many windows."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from rag_windows.errors import InputError, LimitError
from rag_windows.sampling import whole_number

UNLIMITED_ROOM = 2048
"""Tokens of a window, for a model that names no limit of its positions."""

_STEPS = 8
_TRIES = 4


@dataclass(frozen=True, slots=True)
class Sizes:
    """How many windows are filled, or how long they are at most; by default as few as hold all."""

    windows: int | None = None
    window_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.windows is not None and self.window_tokens is not None:
            raise InputError("Give either windows or window_tokens, not both.")
        if self.windows is not None:
            whole_number("windows", self.windows, 0)
        if self.window_tokens is not None:
            whole_number("window_tokens", self.window_tokens)

    def room(self, left: int | None, limit: int | None) -> int:
        """Tokens of a window, where prefix, text and label leave so many of the model's positions.

        In eighths of the positions, so that texts of other lengths mostly find the same windows
        cached.
        """
        asked = self.window_tokens
        if left is None or limit is None:
            return asked or UNLIMITED_ROOM
        if asked is not None:
            if asked > left:
                raise LimitError(
                    f"window_tokens={asked} is more than the {left} tokens that the prefix, the "
                    f"longest text and its label leave of the model's {limit} positions."
                )
            return asked
        step = limit // _STEPS
        return left // step * step if 0 < step <= left else left


def fill(
    shown: Sequence[str],
    separator: str,
    size_of: Callable[[str], int],
    room: int,
    windows: int | None = None,
) -> list[str]:
    """Texts of windows of at most ``room`` tokens that hold whole demonstrations, in order."""
    around = size_of("")
    sizes = []
    for index, text in enumerate(shown):
        size = size_of(text + separator) - around
        if size > room - around and size_of(text) > room:
            raise LimitError(
                f"Demonstration {index} ({text[:40]!r}...) needs a window of {size_of(text)} "
                f"tokens, and a window holds {room}. Shorten it or leave it out; a demonstration "
                "is never cut."
            )
        sizes.append(min(size, room - around))
    usable = room - around
    for _ in range(_TRIES):
        texts = [
            separator.join(shown[one.start : one.stop]) for one in pack(sizes, usable, windows)
        ]
        over = max((size_of(text) - room for text in texts), default=0)
        if over <= 0:
            return texts
        # Texts can make more tokens together than each by itself.
        usable = max(max(sizes), usable - over)
    raise LimitError(
        f"The demonstrations make more tokens together than one by one, so windows of {room} "
        "tokens can't be filled with them. Choose a smaller window_tokens, or more windows."
    )


def pack(sizes: Sequence[int], room: int, windows: int | None = None) -> list[range]:
    """Put neighbours into as few windows as hold them, or into so many, all about as full.

    Each size is at most ``room``. Ranges of indices, which follow each other, none of them empty.
    """
    if not sizes:
        return []
    if windows is not None and not 1 <= windows <= len(sizes):
        raise InputError(
            f"windows={windows} must be between 1 and the number of demonstrations, {len(sizes)}."
        )
    sums = [0, *accumulate(sizes)]
    fewest = start = 0
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
    return [range(a, b) for a, b in pairwise([*ends, len(sizes)])]
