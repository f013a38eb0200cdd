"""The dense reference of fused windows: one float64 forward, the fused keys made in every layer.

As in `dense`, all tokens of [prefix | window 1 | ... | window n | query] run through one forward of
a float64 copy of the model. Rows of prefix and windows see what they always see. In each layer a
row of the query sees the prefix, the query up to itself, and instead of the windows one key and
value a position: the mean or the sum of those that the windows have there, token by token.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from . import dense

NAME = "parity_fused"


@dataclass(frozen=True, slots=True)
class _Call:
    packed: dense.Packed
    lengths: tuple[int, ...]
    rule: dense.Rule
    sliding: Sequence[int | None]
    mean: bool


_call: ContextVar[_Call] = ContextVar("parity_fused_call")


def _fused(states: Tensor, call: _Call) -> Tensor:
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


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    call = _call.get()
    packed, rule = call.packed, call.rule
    groups = query.shape[1] // key.shape[1]
    keys = key.double().repeat_interleave(groups, dim=1)
    values = value.double().repeat_interleave(groups, dim=1)
    factor = query.shape[-1] ** -0.5 if scaling is None else scaling
    reach = call.sliding[cast(int, module.layer_idx)]
    assert softcap is None
    plain = (query.double() @ keys.mT * factor).masked_fill(~packed.visible(reach), -torch.inf)
    output = plain.softmax(-1) @ values

    asking = query.double()[:, :, packed.rows]
    start = int(packed.positions[packed.segments == 1][0])
    places = torch.arange(start, start + max(call.lengths))
    context = asking @ _fused(keys, call).mT * factor / rule.temperature
    if reach is not None:
        far = packed.positions[packed.rows][:, None] - places[None, :] >= reach
        context = context.masked_fill(far, -torch.inf)
    lse = context.logsumexp(-1, keepdim=True)
    lse = lse.masked_fill(lse.isinf(), 0.0)
    context = context - lse + rule.context_lse(lse)
    tail = plain[:, :, packed.rows].masked_fill(packed.context, -torch.inf)
    weights = torch.cat([context, tail], dim=-1).softmax(-1)
    mixed = weights @ torch.cat([_fused(values, call), values], dim=2)
    output = output.clone()
    output[:, :, packed.rows] = mixed
    return output.to(query.dtype).transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, _attention)


@torch.no_grad()
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
    token = _call.set(_Call(packed, lengths, rule, sliding, mean))
    try:
        output = dense.twin(model, NAME)(
            input_ids=packed.ids[None], position_ids=packed.positions[None], use_cache=False
        )
    finally:
        _call.reset(token)
    return output.logits[0, packed.rows].float()
