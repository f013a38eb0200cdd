"""Attention of one token over a whole room and the windows, the same work at any length."""

from __future__ import annotations

import torch

from rag_windows.attention.backends import Request
from rag_windows.attention.layout import Layout
from rag_windows.attention.mix import mix
from rag_windows.step.room import Room
from rag_windows.windows import PackedWindows


class BlindAttention:
    """What the hook does for one new token, decided by tensors alone; a layout's override.

    The hook knows how long the tail is and cuts keys and masks to it. A recorded step may not: how
    far the token sees stands in the room's index, and in its position.

    Args:
        room: of the tail.
        position: (1, 1) int64: of the token.
    """

    def __init__(self, room: Room, position: torch.Tensor) -> None:
        self._room = room
        self._position = position
        self._masks: dict[tuple[str, int | None], torch.Tensor] = {}

    def forget(self) -> None:
        """Let go of the masks of a step; each makes its own, once for all layers."""
        self._masks.clear()

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
        """Attention of the token; see `rag_windows.attention.layout.Override`.

        Args:
            layout: of this call; it has windows.
            layer: number of the layer.
            query: (1, heads, 1, head dim).
            key: (1, kv heads, capacity of the room, head dim).
            value: (1, kv heads, capacity of the room, value dim).
            scale: multiplies the logits.
            softcap: caps them, or None.
            sinks: (heads,) logits of attention sinks, or None.

        Returns:
            (1, heads, 1, value dim) in the query's dtype.
        """
        windows = layout.windows
        tail = self._tail(layout, layer, query, key, value, scale, softcap)
        context = None
        if windows is not None:
            context = self._context(layout, windows, layer, query, scale, softcap)
        return mix(layout, layer, query, tail, context, None, sinks)

    def _tail(
        self,
        layout: Layout,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        softcap: float | None,
    ) -> list[Request]:
        """The room as one segment, or prefix and query as two, as in the hook."""
        mask = self._seen(layout, layout.reach[layer])
        border = layout.prefix_length if layout.query_bias else 0
        parts = [(0, border), (border, key.shape[2])] if border else [(0, key.shape[2])]
        return [
            Request(
                query,
                key[:, :, first:last],
                value[:, :, first:last],
                scale,
                softcap=softcap,
                mask=mask[:, first:last],
            )
            for first, last in parts
        ]

    def _context(
        self,
        layout: Layout,
        windows: PackedWindows,
        layer: int,
        query: torch.Tensor,
        scale: float,
        softcap: float | None,
    ) -> Request:
        """The query heads of one kv head as rows: all of them read the same keys."""
        kv_heads, reach = windows.keys[layer].shape[0], layout.reach[layer]
        folded = query.squeeze(2).unflatten(1, (kv_heads, -1))
        mask = None
        furthest = layout.furthest(self._room.capacity)
        if reach is not None and furthest - windows.first_position >= reach:
            near = self._near(windows, reach)
            mask = near.expand(folded.shape[2], -1)
        return Request(
            folded,
            windows.keys[layer].unsqueeze(0),
            windows.values[layer].unsqueeze(0),
            scale,
            temperature=layout.method.temperature,
            softcap=softcap,
            mask=mask,
        )

    def _seen(self, layout: Layout, reach: int | None) -> torch.Tensor:
        """(1, capacity) bool: places of the room that the token sees."""
        made = self._masks.get(("tail", reach))
        if made is None:
            length, device = self._room.capacity, self._position.device
            made = torch.arange(length, device=device).unsqueeze(0) <= self._room.index
            if reach is not None:
                made = made & (self._position - layout.positions(length, device) < reach)
            self._masks["tail", reach] = made
        return made

    def _near(self, windows: PackedWindows, reach: int) -> torch.Tensor:
        """(1, N) bool: window tokens within reach."""
        made = self._masks.get(("context", reach))
        if made is None:
            made = self._masks["context", reach] = self._position - windows.positions < reach
        return made
