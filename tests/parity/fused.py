"""The dense reference of fused windows: one float64 forward, the fused keys made in every layer.

As in `dense`, all tokens of [prefix | window 1 | ... | window n | query] run through one forward of
`float64`. Rows of prefix and windows see what they always see. In each layer a
row of the query sees the prefix, the query up to itself, and instead of the windows one key and
value a position: the mean or the sum of those that the windows have there, token by token.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from . import dense
from .float64 import Layer, forward


@dataclass(frozen=True, slots=True)
class _Fusion:
    packed: dense.Packed
    lengths: tuple[int, ...]
    rule: dense.Rule
    mean: bool


def _fused(states: Tensor, call: _Fusion) -> Tensor:
    """(1, heads, longest, dim) from the windows' tokens of (1, heads, tokens, dim)."""
    prefix = int((call.packed.segments == dense.PREFIX).sum())
    rows = []
    for place in range(max(call.lengths)):
        there, first = [], prefix
        for length in call.lengths:
            if place < length:
                there.append(states[:, :, first + place])
            first += length
        total = torch.stack(there).sum(0)
        rows.append(total / len(there) if call.mean else total)
    return torch.stack(rows, dim=2)


def _mixed(layer: Layer, call: _Fusion) -> Tensor:
    packed, rule, keys, values = call.packed, call.rule, layer.keys, layer.values
    assert layer.softcap is None
    assert layer.sinks is None
    plain = layer.logits.masked_fill(~layer.seen, -torch.inf)
    output = plain.softmax(-1) @ values

    asking = layer.query.double()[:, :, packed.rows]
    start = int(packed.positions[packed.segments == 1][0])
    places = torch.arange(start, start + max(call.lengths))
    context = asking @ _fused(keys, call).mT * layer.factor / rule.temperature
    if layer.reach is not None:
        far = packed.positions[packed.rows][:, None] - places[None, :] >= layer.reach
        context = context.masked_fill(far, -torch.inf)
    lse = context.logsumexp(-1, keepdim=True)
    lse = lse.masked_fill(lse.isinf(), 0.0)
    context = context - lse + rule.context_lse(lse)
    tail = plain[:, :, packed.rows].masked_fill(packed.context, -torch.inf)
    weights = torch.cat([context, tail], dim=-1).softmax(-1)
    output[:, :, packed.rows] = weights @ torch.cat([_fused(values, call), values], dim=2)
    return output


def logits(
    model: PreTrainedModel,
    sliding: Sequence[int | None],
    prefix: Sequence[int],
    windows: Sequence[Sequence[int]],
    query: Sequence[int],
    rule: dense.Rule,
    *,
    mean: bool,
) -> Tensor:
    """(len(query), vocab) fp32 logits of the query's rows over fused windows."""
    packed = dense.pack(prefix, windows, query)
    lengths = tuple(len(window) for window in windows)
    fusion = _Fusion(packed, lengths, rule, mean)
    return forward(model, sliding, packed, functools.partial(_mixed, call=fusion))
