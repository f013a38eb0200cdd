"""Attention of windows that stand one behind the other in one batch row, without any padding."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch

from rag_windows.attention.backends import Request, attend, native, varlen
from rag_windows.attention.layout import Layout
from rag_windows.attention.merge import merge, merge_weights
from rag_windows.windows import Window


class PackedRows:
    """Each window sees the prefix and itself; a layout's override.

    Layers that treat every token alike, which are all but attention, so run over the tokens of many
    windows at once, whatever their lengths. Windows of equal length share a call of the kernel, so
    those that stand beside each other should be of like length.

    Args:
        lengths: tokens of each window, in the order in which they stand.
        starts: position of each one's first token.
        prefix: what every token sees before its own window, or None.
    """

    __slots__ = ("_lengths", "_positions", "_prefix")

    def __init__(
        self, lengths: Sequence[int], starts: Sequence[int], prefix: Window | None
    ) -> None:
        self._lengths = tuple(lengths)
        self._positions = torch.cat(
            [
                torch.arange(start, start + length)
                for start, length in zip(starts, lengths, strict=True)
            ]
        )
        self._prefix = prefix

    @property
    def positions(self) -> torch.Tensor:
        """(tokens,) int64 on the CPU: of every token of all windows."""
        return self._positions

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
        """Attention of all windows' tokens; see `rag_windows.attention.layout.Override`.

        Args:
            layout: of this call; says how far the layer reaches.
            layer: its number.
            query: (1, heads, tokens, head dim).
            key: (1, kv heads, tokens, head dim).
            value: (1, kv heads, tokens, value dim).
            scale: multiplies the logits.
            softcap: caps them, or None.
            sinks: (heads,) logits of attention sinks, or None.

        Returns:
            (1, heads, tokens, value dim) in the query's dtype.
        """
        reach = layout.reach[layer]
        own, own_lse = attend_own(self._lengths, query, key, value, scale, softcap, reach)
        if self._prefix is None and sinks is None:
            return own
        sink = None if sinks is None else sinks.to(own_lse.dtype).view(1, -1, 1)
        if self._prefix is None:
            return merge([own], merge_weights([own_lse], sink))
        before, before_lse = self._before(self._prefix, layer, query, scale, softcap, reach)
        return merge([before, own], merge_weights([before_lse, own_lse], sink))

    def _before(
        self,
        prefix: Window,
        layer: int,
        query: torch.Tensor,
        scale: float,
        softcap: float | None,
        reach: int | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention over the prefix, heads of one kv head folded into rows: they read one copy."""
        key, value = prefix.keys[layer], prefix.values[layer]
        kv_heads = key.shape[0]
        groups = query.shape[1] // kv_heads
        mask = None
        if reach is not None and int(self._positions.max()) - prefix.start >= reach:
            index = torch.arange(prefix.start, prefix.start + key.shape[1])
            near = self._positions.unsqueeze(-1) - index < reach
            mask = near.to(query.device).repeat(groups, 1)
        output, lse = attend(
            Request(
                query[0].unflatten(0, (kv_heads, groups)).flatten(1, 2).unsqueeze(0),
                key.unsqueeze(0),
                value.unsqueeze(0),
                scale,
                softcap=softcap,
                mask=mask,
            )
        )
        tokens = query.shape[2]
        return (
            output.unflatten(2, (groups, tokens)).flatten(1, 2),
            lse.unflatten(2, (groups, tokens)).flatten(1, 2),
        )


def attend_own(
    lengths: Sequence[int],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    softcap: float | None,
    reach: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention of each of several texts over itself alone.

    Args:
        lengths: tokens of each, in the order in which they stand one behind the other.
        query: (1, heads, tokens, head dim).
        key: (1, kv heads, tokens, head dim).
        value: (1, kv heads, tokens, value dim).
        scale: multiplies the logits.
        softcap: caps them, or None.
        reach: positions that a token sees, or None for all.

    Returns:
        Output (1, heads, tokens, value dim) and lse (1, heads, tokens), as backends give them.
    """
    if varlen.serves(lengths, query, key, value, softcap, reach):
        return varlen.attend(lengths, query, key, value, scale, reach)
    if native.serves_own(lengths, query, key, value, reach):
        return native.attend_own(lengths, query, key, value, scale, softcap)
    outputs, lses = [], []
    first = 0
    for length, group in groupby(lengths):
        count = sum(1 for _ in group)
        last = first + count * length
        near = reach is None or length <= reach
        output, lse = attend(
            Request(
                _rows(query, first, last, length),
                _rows(key, first, last, length),
                _rows(value, first, last, length),
                scale,
                softcap=softcap,
                causal=near,
                mask=None if near else _band(length, reach, query.device),
            )
        )
        outputs.append(output.transpose(0, 1).flatten(1, 2))
        lses.append(lse.transpose(0, 1).flatten(1, 2))
        first = last
    return torch.cat(outputs, dim=1).unsqueeze(0), torch.cat(lses, dim=1).unsqueeze(0)


def _rows(tensor: torch.Tensor, first: int, last: int, length: int) -> torch.Tensor:
    """(1, heads, tokens, dim) from first to last as (windows, heads, length, dim), not copied."""
    return tensor[0, :, first:last].unflatten(1, (-1, length)).transpose(0, 1)


def _band(length: int, reach: int | None, device: torch.device) -> torch.Tensor:
    """(length, length) bool: what each token of a window sees of it."""
    index = torch.arange(length, device=device)
    distance = index.unsqueeze(-1) - index
    return (distance >= 0) & (distance < (reach or length))
