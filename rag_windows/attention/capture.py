"""The keys and values that a forward pass makes, one pair a layer."""

from __future__ import annotations

import torch


class AllCaptured(Exception):
    """Ends a forward pass of which only keys and values are wanted, once all of them are there.

    What follows them in the last layer, its attention and feed-forward, changes none. Unwinding is
    the only way out of a model's own loop over its layers that fits every architecture.
    """


class Capture:
    """Keeps what each layer hands to attention.

    Taking them here rather than from a cache keeps the model's forward pass free of any copy, and
    sees them exactly as attention does: rotated, and per key/value head.

    Args:
        last: the layer with which the pass may end, by `AllCaptured`; None to let it run.
    """

    __slots__ = ("_last", "keys", "values")

    def __init__(self, last: int | None = None) -> None:
        self._last = last
        self.keys: dict[int, torch.Tensor] = {}
        self.values: dict[int, torch.Tensor] = {}

    def keep(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Keep one layer's ``key`` (batch, kv heads, tokens, head dim) and ``value``.

        Raises:
            AllCaptured: nothing more is wanted of this pass.
        """
        self.keys[layer] = key
        self.values[layer] = value
        if layer == self._last:
            raise AllCaptured
