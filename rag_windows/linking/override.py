"""Attention of the pass that links windows: fresh keys take the place of those of before."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rag_windows.attention.backends import Request, attend
from rag_windows.attention.layout import Layout
from rag_windows.attention.merge import merge, merge_weights


class Relink:
    """Keys and values of one context, some of which forward passes replace; a layout's override.

    Token ``i`` stands at position ``i``: the prefix, then the windows one behind the other.

    Args:
        keys: per layer, (kv heads, tokens, head dim); written to.
        values: per layer, (kv heads, tokens, value dim); written to.
    """

    __slots__ = ("_rows", "keys", "values")

    def __init__(self, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
        self.keys = tuple(keys)
        self.values = tuple(values)
        self._rows = torch.empty(0, dtype=torch.int64)

    def take(self, rows: torch.Tensor) -> None:
        """Say which tokens the next forward pass is fed.

        Args:
            rows: (n,) int64, ascending, on the CPU.
        """
        self._rows = rows

    def attend(
        self,
        layout: Layout,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scale: float,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attention of the fed tokens over every token up to themselves, fed or not.

        Args:
            layout: of this call.
            layer: whose keys and values of the fed tokens are replaced before.
            query: (1, heads, rows, head dim).
            key: (1, kv heads, rows, head dim).
            value: (1, kv heads, rows, value dim).
            scale: multiplies the logits.
            softcap: caps them, or None.
            sinks: (heads,) logits of attention sinks, or None.

        Returns:
            (1, heads, rows, value dim) in the query's dtype.
        """
        rows = self._rows.to(key.device)
        self.keys[layer].index_copy_(1, rows, key[0])
        self.values[layer].index_copy_(1, rows, value[0])
        seen = int(self._rows[-1]) + 1
        index = torch.arange(seen, device=key.device)
        mask = index <= rows.unsqueeze(-1)
        reach = layout.reach[layer]
        if reach is not None:
            mask = mask & (rows.unsqueeze(-1) - index < reach)
        keys, values = self.keys[layer][None, :, :seen], self.values[layer][None, :, :seen]
        output, lse = attend(Request(query, keys, values, scale, softcap=softcap, mask=mask))
        if sinks is None:
            return output
        return merge([output], merge_weights([lse], sinks.to(lse.dtype).view(1, -1, 1)))
