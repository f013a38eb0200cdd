"""A dense float64 reference of queries that weigh themselves, without any merge of segments.

All tokens run through one forward of `float64`, as in `dense`, but with the attention of the
methods that weigh the query spelled out twice:

- `copies`: the query's keys and values literally stand there several times for rows of the query;
- `weight`: the exponentials of the query's logits are multiplied by a number, and so counted in the
  softmax's sum.

Windows may end together ("right"): window i then starts at p + longest - its own length; or each at
a multiple of `Weighed.every` tokens behind the prefix.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from . import dense
from .dense import Packed
from .float64 import Layer, forward


@dataclass(frozen=True, slots=True)
class Weighed:
    """How rows of the query weigh the query's keys, and where windows stand."""

    copies: int = 1
    weight: float = 1.0
    right: bool = False
    every: int = 0


def pack(
    prefix: Sequence[int],
    windows: Sequence[Sequence[int]],
    query: Sequence[int],
    rule: Weighed,
) -> Packed:
    """All tokens in one row, where the rule says."""
    packed = dense.pack(prefix, windows, query)
    if not windows or not (rule.right or rule.every):
        return packed
    lengths = [len(window) for window in windows]
    every = rule.every or max(lengths)
    ends = [math.ceil(length / every) * every for length in lengths]
    positions = packed.positions.clone()
    for number, (end, length) in enumerate(zip(ends, lengths, strict=True), start=1):
        positions[packed.segments == number] += end - length
    positions[packed.rows] += max(ends) - max(lengths)
    return replace(packed, positions=positions)


def weights(layer: Layer, packed: Packed, rule: Weighed) -> Tensor:
    """(1, heads, tokens, tokens and copies) float64 attention weights."""
    rows = packed.rows
    logits = layer.logits.masked_fill(~layer.seen, -torch.inf)
    # The copies stand behind all tokens, and only rows of the query see them.
    own = logits[..., rows].masked_fill(~rows[:, None], -torch.inf)
    logits = torch.cat([logits, *[own] * (rule.copies - 1)], dim=-1)
    peak = logits.amax(-1, keepdim=True)
    sinks = layer.sinks
    if sinks is not None:
        column = sinks.to(logits).view(1, -1, 1, 1).expand(1, -1, logits.shape[2], -1)
        peak = torch.maximum(peak, column)
    exponentials = torch.exp(logits - peak)
    weighed = torch.ones(exponentials.shape[-2:], dtype=torch.float64)
    weighed[: len(rows), : len(rows)][rows[:, None] & rows] = rule.weight
    exponentials = exponentials * weighed
    total = exponentials.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(column - peak)
    return exponentials / total


def run(
    model: PreTrainedModel,
    sliding: Sequence[int | None],
    prefix: Sequence[int],
    windows: Sequence[Sequence[int]],
    query: Sequence[int],
    rule: Weighed,
) -> tuple[Tensor, Packed, list[Tensor]]:
    """(len(query), vocab) fp32 logits of the query's rows, the tokens, each layer's weights."""
    packed = pack(prefix, windows, query, rule)
    kept: list[Tensor] = []

    def mixed(layer: Layer) -> Tensor:
        kept.append(weights(layer, packed, rule))
        own = [layer.values[:, :, packed.rows]] * (rule.copies - 1)
        return kept[-1] @ torch.cat([layer.values, *own], dim=2)

    return forward(model, sliding, packed, mixed), packed, kept


def shares(packed: Packed, kept: Sequence[Tensor]) -> Tensor:
    """(windows + 2,) mean over layers and heads of the last row's mass, without sinks.

    Of each window, the prefix and the query, copies included.
    """
    rows = torch.stack([weights[0, :, -1] for weights in kept])
    length = len(packed.ids)
    parts = [rows[..., :length][..., packed.segments == s].sum(-1) for s in range(packed.query + 1)]
    prefix, *groups, query = parts
    masses = torch.stack([*groups, prefix, query + rows[..., length:].sum(-1)], dim=-1)
    return (masses / masses.sum(-1, keepdim=True)).mean(dim=(0, 1)).float()
