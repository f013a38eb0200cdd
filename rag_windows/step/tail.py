"""The tail as an HF cache whose tokens are written in place."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import Cache, DynamicLayer

from rag_windows.step.room import Room
from rag_windows.windows import Window

if TYPE_CHECKING:
    from rag_windows.step.session import Session


class StaticTail(Cache):
    """The tail of one query, in a room of its own.

    An ordinary forward pass reads the tokens that are there, a blind step the whole room behind a
    mask. Whatever rearranges the tail (beams, rejected drafts) makes it an ordinary cache.

    Attributes:
        session: that takes the single steps of one call; or None.

    Args:
        room: of nobody else.
        prefix: what it holds at first, or None.
    """

    def __init__(self, room: Room, prefix: Window | None) -> None:
        self._placed = [_PlacedLayer(room, number) for number in range(len(room.keys))]
        super().__init__(layers=list(self._placed))
        self.session: Session | None = None
        if prefix is not None:
            for number, (key, value) in enumerate(zip(prefix.keys, prefix.values, strict=True)):
                self.update(key.unsqueeze(0), value.unsqueeze(0), number)

    @property
    def placed(self) -> bool:
        """Whether it still stands in its room."""
        return all(layer.room is not None for layer in self._placed)

    def advance(self) -> None:
        """Count a token that a blind step has written at the end."""
        for layer in self._placed:
            layer.length += 1

    def settle(self) -> None:
        """Leave the room, which nobody writes to any more; what is there stays."""
        for layer in self._placed:
            layer.settle()


class _PlacedLayer(DynamicLayer):
    """One layer's part of a room; after `settle`, what it derives from.

    Args:
        room: of the tail.
        number: of the layer.
    """

    def __init__(self, room: Room, number: int) -> None:
        super().__init__()
        self.room: Room | None = room
        self.length = 0
        self._number = number

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write tokens (1, kv heads, tokens, dim), and give what the pass may read."""
        room = self.room
        if room is None:
            self.keys, self.values = super().update(key_states, value_states, *args, **kwargs)
            return self.keys, self.values
        if room.blind:
            keys, values = room.keys[self._number], room.values[self._number]
            keys.index_copy_(2, room.index, key_states)
            values.index_copy_(2, room.index, value_states)
            return keys, values
        first, self.length = self.length, self.length + key_states.shape[2]
        room.reserve(self.length)
        keys, values = room.keys[self._number], room.values[self._number]
        keys[:, :, first : self.length] = key_states
        values[:, :, first : self.length] = value_states
        return keys[:, :, : self.length], values[:, :, : self.length]

    def get_seq_length(self) -> int:
        """Tokens that are there."""
        return int(super().get_seq_length()) if self.room is None else self.length

    def settle(self) -> None:
        """Hold what is there as an ordinary layer does."""
        room, self.room = self.room, None
        if room is None or not self.length:
            return
        self.lazy_initialization(room.keys[self._number], room.values[self._number])
        self.keys = room.keys[self._number][:, :, : self.length]
        self.values = room.values[self._number][:, :, : self.length]

    def crop(self, tokens_to_remove: int) -> None:
        """See transformers."""
        self.settle()
        super().crop(tokens_to_remove)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """See transformers."""
        self.settle()
        super().reorder_cache(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """See transformers."""
        self.settle()
        super().batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """See transformers."""
        self.settle()
        super().batch_select_indices(indices)

    def reset(self) -> None:
        """See transformers."""
        self.length = 0
        super().reset()
