"""Attention of the pass that links windows: fresh keys take the place of those of before."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rag_windows.attention.segments import Reading, Rows, Segment, Segments


class RecomputeLayout:
    """Keys and values of one context, some of which forward passes replace.

    Token ``i`` stands at position ``i``: the prefix, then the windows one behind the other. The fed
    tokens see every token up to themselves, whether that one is fed or not.

    Args:
        reach: see `rag_windows.attention.layout.Layout`.
        keys: per layer, (kv heads, tokens, head dim); written to.
        values: per layer, (kv heads, tokens, value dim); written to.
    """

    capture = None
    weighs = False

    def __init__(
        self,
        reach: tuple[int | None, ...],
        keys: Sequence[torch.Tensor],
        values: Sequence[torch.Tensor],
    ) -> None:
        self.reach = reach
        self.keys = tuple(keys)
        self.values = tuple(values)
        self.take(torch.zeros(1, dtype=torch.int64))

    def take(self, rows: torch.Tensor) -> None:
        """Say which tokens the next forward pass is fed.

        Args:
            rows: (n,) int64, ascending, on the CPU.
        """
        self._rows = rows
        self._segment = Segment(first=0, last=int(rows[-1]), seen=rows + 1)
        whole = Segments("query", [self._segment], len(rows))
        self._reading = Reading(Rows.at(rows), [whole])

    def reading(
        self, layer: int, batch: int, rows: int, key: torch.Tensor, value: torch.Tensor
    ) -> Reading:
        """Replace the fed tokens' keys and values, and say what they read."""
        fed = self._rows.to(key.device)
        self.keys[layer].index_copy_(1, fed, key[0])
        self.values[layer].index_copy_(1, fed, value[0])
        seen = self._segment.last + 1
        part = self.keys[layer][None, :, :seen], self.values[layer][None, :, :seen]
        self._segment.layers = {layer: [part]}
        return self._reading

    def record(self, layer: int, reading: Reading, weights: Sequence[torch.Tensor]) -> None:
        """Nothing is recorded."""
