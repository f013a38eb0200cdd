"""Deep-Thinking written out on dense caches: one window at a time, the plain model in float64.

Nothing here comes from the engine. With `KV_0` the plain encoding behind the prefix, `G_t` what
pass t makes of the window's tokens behind [prefix | KV_{t-1}], pass t = 1..steps is

    m_t  = (G_t - KV_{t-1}) + momentum * m_{t-1},   m_0 = 0
    KV_t = KV_{t-1} + eta * m_t

Masks are explicit: a token of a pass sees the prefix, all of KV_{t-1} and its own pass up to
itself; a sliding layer only what stands less than its reach before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from . import float64
from .architectures import Entry

Layers = list[tuple[Tensor, Tensor]]
"""Keys and values of each layer, (kv heads, tokens, dim) float64."""


@dataclass(frozen=True, slots=True)
class Update:
    """The numbers of the update."""

    steps: int
    eta: float
    momentum: float
    continued: bool


@torch.no_grad()
def refined(
    model: PreTrainedModel,
    entry: Entry,
    prefix: Sequence[int],
    window: Sequence[int],
    rule: Update,
    start: int | None = None,
) -> Layers:
    """Keys and values of one window after all passes.

    It stands at `start`, right behind the prefix by default.
    """
    start, length = len(prefix) if start is None else start, len(window)
    known = list(range(len(prefix)))
    before: Layers = []
    if prefix:
        before = _run(model, entry, [], [], prefix, known)
    places = list(range(start, start + length))
    state = _run(model, entry, before, known, window, places)
    moving: Layers | None = None
    for _ in range(rule.steps):
        first = start + length if rule.continued else start
        made = _run(
            model,
            entry,
            _joined(before, state),
            [*known, *places],
            window,
            list(range(first, first + length)),
        )
        gradient = [(k - a, v - b) for (k, v), (a, b) in zip(made, state, strict=True)]
        if moving is None:
            moving = gradient
        else:
            moving = [
                (k + rule.momentum * a, v + rule.momentum * b)
                for (k, v), (a, b) in zip(gradient, moving, strict=True)
            ]
        state = [
            (a + rule.eta * k, b + rule.eta * v)
            for (k, v), (a, b) in zip(moving, state, strict=True)
        ]
    return state


@torch.no_grad()
def logits(
    model: PreTrainedModel,
    entry: Entry,
    prefix: Sequence[int],
    windows: Sequence[Sequence[int]],
    query: Sequence[int],
    rule: Update,
) -> Tensor:
    """(len(query), vocab) fp32 logits of a query that reads prefix and refined windows."""
    start = len(prefix)
    places = list(range(start))
    known: Layers = []
    if prefix:
        known = _run(model, entry, [], [], prefix, places)
    for window in windows:
        known = _joined(known, refined(model, entry, prefix, window, rule))
        places = [*places, *range(start, start + len(window))]
    first = start + max(len(window) for window in windows)
    output = _call(
        model, entry, _cache(known), places, query, list(range(first, first + len(query)))
    )
    return torch.as_tensor(output.logits)[0].float()


def _joined(one: Layers, other: Layers) -> Layers:
    if not one:
        return other
    return [
        (torch.cat([k, a], dim=1), torch.cat([v, b], dim=1))
        for (k, v), (a, b) in zip(one, other, strict=True)
    ]


def _cache(known: Layers) -> DynamicCache:
    cache = DynamicCache()
    for layer, (key, value) in enumerate(known):
        cache.update(key[None], value[None], layer)
    return cache


def _run(
    model: PreTrainedModel,
    entry: Entry,
    known: Layers,
    places: list[int],
    tokens: Sequence[int],
    positions: list[int],
) -> Layers:
    """What one pass over `tokens` makes behind `known`, whose positions are `places`."""
    cache = _cache(known)
    _call(model, entry, cache, places, tokens, positions)
    return [
        (layer.keys[0, :, -len(tokens) :], layer.values[0, :, -len(tokens) :])
        for layer in cache.layers
    ]


def _call(
    model: PreTrainedModel,
    entry: Entry,
    cache: DynamicCache,
    places: list[int],
    tokens: Sequence[int],
    positions: list[int],
) -> Any:
    new = torch.tensor(positions)
    old = torch.tensor(places, dtype=torch.int64)

    def additive(reach: int | None) -> Tensor:
        earlier = torch.ones(len(new), len(old), dtype=torch.bool)
        own = torch.ones(len(new), len(new), dtype=torch.bool).tril()
        seen = torch.cat([earlier, own], dim=1)
        if reach is not None:
            seen &= new[:, None] - torch.cat([old, new])[None, :] < reach
        blocked = torch.zeros(seen.shape, dtype=torch.float64)
        return blocked.masked_fill(~seen, torch.finfo(torch.float64).min)[None, None]

    mask: Any = additive(entry.sliding[0])
    if entry.mask_by_type:
        reach = next((r for r in entry.sliding if r is not None), None)
        mask = {"full_attention": additive(None), "sliding_attention": additive(reach)}
    return float64.twin(model, "eager")(
        input_ids=torch.tensor([list(tokens)]),
        position_ids=new[None],
        attention_mask=mask,
        past_key_values=cache,
        use_cache=True,
    )
