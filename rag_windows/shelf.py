"""Room for the keys and values of all windows of a request, one tensor a layer."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from rag_windows.windows import Window


class Shelf:
    """Windows side by side in memory, as queries read them, so that nobody copies them again.

    Each forward pass is copied in as it ends, and its own tensors go: at no time are there two of
    all keys and values.

    Args:
        lengths: tokens of each window, in the order of the request.
    """

    def __init__(self, lengths: Sequence[int]) -> None:
        self._ends = tuple(accumulate(lengths))
        self._starts = (0, *self._ends[:-1])
        self._keys: list[torch.Tensor] = []
        self._values: list[torch.Tensor] = []

    def put(self, index: int, window: Window) -> Window:
        """Copy a window in.

        Returns:
            The same window, standing on the shelf.
        """
        if not self._keys:
            self._keys = [self._room(tensor) for tensor in window.keys]
            self._values = [self._room(tensor) for tensor in window.values]
        place = slice(self._starts[index], self._ends[index])
        return Window(
            ids=window.ids,
            start=window.start,
            keys=_copied(self._keys, place, window.keys),
            values=_copied(self._values, place, window.values),
        )

    def _room(self, like: torch.Tensor) -> torch.Tensor:
        return like.new_empty(like.shape[0], self._ends[-1], like.shape[2])


def _copied(
    room: Sequence[torch.Tensor], place: slice, tensors: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    made = []
    for whole, tensor in zip(room, tensors, strict=True):
        part = whole[:, place]
        part.copy_(tensor)
        made.append(part)
    return tuple(made)
