"""The keys and values that a forward pass makes, one pair a layer."""

from __future__ import annotations

import torch


class Capture:
    """Keeps what each layer hands to attention.

    Taking them here rather than from a cache keeps the model's forward pass free of any copy, and
    sees them exactly as attention does: rotated, and per key/value head.
    """

    __slots__ = ("keys", "values")

    def __init__(self) -> None:
        self.keys: dict[int, torch.Tensor] = {}
        self.values: dict[int, torch.Tensor] = {}

    def keep(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Keep one layer's ``key`` (batch, kv heads, tokens, head dim) and ``value``."""
        self.keys[layer] = key
        self.values[layer] = value
