"""Memory in which tensors are joined for a moment, one join after the other."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

import torch


class Kind(Enum):
    """What is joined; each kind has its own memory."""

    KEYS = 0
    VALUES = 1


class Scratch:
    """Joins tensors into the same memory again and again.

    A system hands out fresh memory a page at a time, when it is first written to, which takes a
    multiple of the copy itself. Not for several threads at once.
    """

    def __init__(self) -> None:
        self._rooms: dict[tuple[Kind, torch.dtype, torch.device], torch.Tensor] = {}

    def joined(self, kind: Kind, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Join (heads, tokens, dim) tensors along the tokens.

        Args:
            kind: the memory; what was joined there before is gone.
            tensors: at least one, of one dtype, device, number of heads and dim.

        Returns:
            (heads, all tokens, dim); the tensor itself if it is the only one.
        """
        if len(tensors) == 1:
            return tensors[0]
        first = tensors[0]
        shape = first.shape[0], sum(tensor.shape[1] for tensor in tensors), first.shape[2]
        size = shape[0] * shape[1] * shape[2]
        key = (kind, first.dtype, first.device)
        room = self._rooms.get(key)
        if room is None or len(room) < size:
            room = self._rooms[key] = first.new_empty(size)
        return torch.cat(list(tensors), dim=1, out=room[:size].view(shape))
