"""Small windows for tests of the cache."""

from __future__ import annotations

import time

import torch

from rag_windows.cache.codec import Entry
from rag_windows.kv import Window


def key(number: int) -> str:
    """A key as sha256 gives it."""
    return f"{number:064x}"


def window(
    tokens: int = 8,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    shapes: tuple[tuple[int, int, int], ...] = ((2, 6, 6), (2, 6, 6), (1, 4, 5)),
) -> Window:
    """Random keys and values; per layer (kv heads, key width, value width)."""
    generator = torch.Generator().manual_seed(seed)

    def draw(heads: int, width: int) -> torch.Tensor:
        # A few channels are much larger than the others, as keys of trained models have them.
        channel = torch.randn(heads, 1, width, generator=generator).mul(2).exp()
        return (torch.randn(heads, tokens, width, generator=generator) * channel).to(dtype)

    return Window(
        ids=tuple(range(100, 100 + tokens)),
        start=3,
        keys=tuple(draw(heads, width) for heads, width, _ in shapes),
        values=tuple(draw(heads, width) for heads, _, width in shapes),
    )


def entry(
    tokens: int = 8,
    *,
    seed: int = 0,
    cost_s: float = 1.0,
    labels: tuple[str, ...] = (),
    expires: float | None = None,
    dtype: torch.dtype = torch.float32,
) -> Entry:
    """An entry of a random window."""
    made = window(tokens, seed=seed, dtype=dtype)
    return Entry(made, cost_s, labels, time.time(), expires)


def same(one: Window, other: Window) -> bool:
    """Whether two windows are the same bit for bit."""
    pairs = zip((*one.keys, *one.values), (*other.keys, *other.values), strict=True)
    equal = all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)
    return equal and (one.ids, one.start) == (other.ids, other.start)
