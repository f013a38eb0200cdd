"""Keys and values of a tail at addresses that stay, with room ahead."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from rag_windows.windows import PackedWindows

BUCKETS = (64, 1024)
"""Tokens of the smallest bucket, and of the one from which on they no longer double: what a step
reads of an empty room is wasted."""


def bucket(tokens: int) -> int:
    """The bucket for so many tokens: 64, 128, ..., 1,024, then multiples of that."""
    smallest, last = BUCKETS
    if tokens > last:
        return -(-tokens // last) * last
    return max(smallest, 1 << (tokens - 1).bit_length())


class Room:
    """Preallocated keys and values of one tail, a pair a layer.

    They are zeros at first, not what memory happens to hold: masked weights times NaN would be NaN.
    Not for several threads at once.

    Attributes:
        keys: per layer, (1, kv heads, capacity, head dim).
        values: per layer, (1, kv heads, capacity, value dim).
        index: (1,) int64 on their device: where a blind step writes; it sees all up to there.
        capacity: tokens, a bucket.
        blind: whether a step is running that may not know how many tokens there are.

    Args:
        windows: of the same model; their sizes, dtype and device are the room's.
        tokens: that there must be room for.
    """

    def __init__(self, windows: PackedWindows, tokens: int) -> None:
        self.capacity = bucket(tokens)
        self.keys = [_zeros(key, self.capacity) for key in windows.keys]
        self.values = [_zeros(value, self.capacity) for value in windows.values]
        self.index = torch.zeros(1, dtype=torch.int64, device=self.keys[0].device)
        self.blind = False

    def reserve(self, tokens: int) -> None:
        """Move to a larger bucket if ``tokens`` do not fit; the keys and values stand elsewhere."""
        if tokens <= self.capacity:
            return
        more = bucket(tokens) - self.capacity
        self.keys = [_longer(key, more) for key in self.keys]
        self.values = [_longer(value, more) for value in self.values]
        self.capacity += more

    @contextmanager
    def blindly(self) -> Iterator[None]:
        """Have the tail written at `index` and read whole, which is the same work at any length."""
        self.blind = True
        try:
            yield
        finally:
            self.blind = False


def _zeros(like: torch.Tensor, capacity: int) -> torch.Tensor:
    """(1, kv heads, capacity, dim) for a layer's (kv heads, tokens, dim)."""
    return like.new_zeros(1, like.shape[0], capacity, like.shape[2])


def _longer(held: torch.Tensor, more: int) -> torch.Tensor:
    return torch.nn.functional.pad(held, (0, 0, 0, more))
