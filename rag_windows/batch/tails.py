"""The tails of a batch: each row's query and answer so far."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rag_windows.attention.backends import Request, attend
from rag_windows.attention.native.calling import call
from rag_windows.attention.native.items import Items, Reading
from rag_windows.batch.apart import most_tokens

FIRST_ROOM = 64
"""Tokens for which there is room before the tails grow for the first time."""


class Tails:
    """Keys and values of each row's own tokens, with room ahead, so that a token is one write.

    Row ``i`` of a batch is row ``i`` of the tensors. Not for several threads at once.

    Attributes:
        lengths: tokens of each row.
    """

    def __init__(self) -> None:
        self.lengths: list[int] = []
        self._keys: dict[int, torch.Tensor] = {}
        self._values: dict[int, torch.Tensor] = {}
        self._masks: dict[tuple[int | None, torch.device], torch.Tensor | None] = {}
        self._places: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}

    def remove(self, row: int) -> None:
        """Let go of a row; the last one takes its place."""
        last = len(self.lengths) - 1
        length = self.lengths[last]
        if row != last:
            for room in (*self._keys.values(), *self._values.values()):
                room[row, :, :length] = room[last, :, :length]
            self.lengths[row] = length
        self.undo(self.lengths[:last])

    def grow(self, tokens: Sequence[int]) -> None:
        """Count the tokens of the pass that begins, by row; rows that are new stand behind."""
        self.lengths += [0] * (len(tokens) - len(self.lengths))
        self.lengths = [length + n for length, n in zip(self.lengths, tokens, strict=True)]
        self._masks.clear()
        self._places.clear()

    def undo(self, lengths: Sequence[int]) -> None:
        """Let each row have so many tokens again, and forget the rows behind them."""
        self.lengths = list(lengths)
        if not self.lengths:
            self._keys.clear()
            self._values.clear()

    def fill(
        self, layer: int, row: int, lengths: Sequence[int], key: torch.Tensor, value: torch.Tensor
    ) -> None:
        """Write the first tokens of new rows.

        Args:
            layer: whose.
            row: the first new one.
            lengths: tokens of each.
            key: (kv heads, tokens of all, head dim).
            value: (kv heads, tokens of all, value dim).
        """
        keys, values = self._room(layer, key, value)
        first = 0
        for offset, length in enumerate(lengths):
            keys[row + offset, :, :length] = key[:, first : first + length]
            values[row + offset, :, :length] = value[:, first : first + length]
            first += length

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        softcap: float | None,
        reach: int | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write one token of each of the first rows, and let it see its own tail.

        Args:
            layer: whose.
            query: (rows, heads, head dim).
            key: (kv heads, rows, head dim).
            value: (kv heads, rows, value dim).
            scale: multiplies the logits.
            softcap: caps them, or None.
            reach: positions that a token sees, or None for all.

        Returns:
            Output (rows, heads, value dim) and lse (rows, heads).
        """
        rows, device = query.shape[0], key.device
        keys, values = self._room(layer, key, value)
        # What is made here holds for all layers of a pass, but for their device and their reach.
        if device not in self._places:
            ends = torch.tensor(self.lengths[:rows], device=device) - 1
            self._places[device] = torch.arange(rows, device=device), ends
        index, ends = self._places[device]
        keys[index, :, ends] = key.transpose(0, 1)
        values[index, :, ends] = value.transpose(0, 1)
        if most_tokens(keys[0], values[0], query.shape[1]) >= 1:
            readings = [
                Reading([_end(keys, values, row, length, reach)], [row], scale, softcap, 1.0)
                for row, length in enumerate(self.lengths[:rows])
            ]
            return call(Items(readings), query)
        longest = max(self.lengths[:rows])
        if (reach, device) not in self._masks:
            mask = self._mask(rows, longest, reach)
            self._masks[reach, device] = None if mask is None else mask.to(device)
        output, lse = attend(
            Request(
                query.unsqueeze(2),
                keys[:rows, :, :longest],
                values[:rows, :, :longest],
                scale,
                softcap=softcap,
                mask=self._masks[reach, device],
            )
        )
        return output.squeeze(2), lse.squeeze(2)

    def _mask(self, rows: int, longest: int, reach: int | None) -> torch.Tensor | None:
        """Bool (rows, 1, 1, longest): what the newest token of each row sees; None for all."""
        lengths = self.lengths[:rows]
        if min(lengths) == longest and (reach is None or longest <= reach):
            return None
        behind = torch.tensor(lengths).unsqueeze(-1) - 1 - torch.arange(longest)
        mask = behind >= 0
        if reach is not None:
            mask &= behind < reach
        return mask[:, None, None]

    def _room(
        self, layer: int, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        held = self._keys.get(layer)
        rows, tokens = len(self.lengths), max(*self.lengths, FIRST_ROOM)
        if held is None or held.shape[0] < rows or held.shape[2] < tokens:
            if held is not None:
                rows = held.shape[0] if held.shape[0] >= rows else max(rows, 2 * held.shape[0])
                tokens = held.shape[2] if held.shape[2] >= tokens else 2 * tokens
            # Both or none: memory may end between them.
            grown = _grown(held, key, rows, tokens)
            self._values[layer] = _grown(self._values.get(layer), value, rows, tokens)
            self._keys[layer] = grown
        return self._keys[layer], self._values[layer]


def _end(
    keys: torch.Tensor, values: torch.Tensor, row: int, length: int, reach: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the newest token of a row sees of its tail."""
    first = 0 if reach is None else max(0, length - reach)
    return keys[row, :, first:length], values[row, :, first:length]


def _grown(held: torch.Tensor | None, like: torch.Tensor, rows: int, tokens: int) -> torch.Tensor:
    """Zeros, not what memory happens to hold: masked weights times NaN would be NaN."""
    room = like.new_zeros(rows, like.shape[0], tokens, like.shape[2])
    if held is not None:
        room[: held.shape[0], :, : held.shape[2]] = held
    return room
