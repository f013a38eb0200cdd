"""A dense float64 reference of queries that weigh themselves, without any merge of segments.

All tokens run through one forward of a float64 copy of the model, as in `dense`, but with the
attention of the methods that weigh the query spelled out twice:

- `copies`: the query's keys and values literally stand there several times for rows of the query;
- `weight`: the exponentials of the query's logits are multiplied by a number, and so counted in the
  softmax's sum.

Windows may end together ("right"): window i then starts at p + longest - its own length.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from . import dense
from .dense import Packed

NAME = "parity_weighted"


@dataclass(frozen=True, slots=True)
class Weighed:
    """How rows of the query weigh the query's keys, and where windows stand."""

    copies: int = 1
    weight: float = 1.0
    right: bool = False


@dataclass(frozen=True, slots=True)
class _Call:
    packed: Packed
    rule: Weighed
    sliding: Sequence[int | None]
    kept: list[Tensor] = field(default_factory=list)


_call: ContextVar[_Call] = ContextVar("parity_weighted_call")


def pack(
    prefix: Sequence[int],
    windows: Sequence[Sequence[int]],
    query: Sequence[int],
    right: bool,
) -> Packed:
    """All tokens in one row; windows begin or end together."""
    packed = dense.pack(prefix, windows, query)
    if not right:
        return packed
    longest = max(len(window) for window in windows)
    positions = packed.positions.clone()
    for number, window in enumerate(windows, start=1):
        positions[packed.segments == number] += longest - len(window)
    return replace(packed, positions=positions)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    call = _call.get()
    rule, rows = call.rule, call.packed.rows
    groups = query.shape[1] // key.shape[1]
    keys, values = (t.double().repeat_interleave(groups, dim=1) for t in (key, value))
    factor = query.shape[-1] ** -0.5 if scaling is None else scaling
    logits = query.double() @ keys.mT * factor
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    seen = call.packed.visible(call.sliding[cast(int, module.layer_idx)])
    logits = logits.masked_fill(~seen, -torch.inf)
    # The copies stand behind all tokens, and only rows of the query see them.
    own = logits[..., rows].masked_fill(~rows[:, None], -torch.inf)
    logits = torch.cat([logits, *[own] * (rule.copies - 1)], dim=-1)
    values = torch.cat([values, *[values[:, :, rows]] * (rule.copies - 1)], dim=2)
    sinks = torch.zeros(0) if s_aux is None else s_aux.to(logits)
    column = sinks.view(1, -1, 1, 1).expand(1, -1, logits.shape[2], -1)
    peak = logits.amax(-1, keepdim=True)
    if s_aux is not None:
        peak = torch.maximum(peak, column)
    exponentials = torch.exp(logits - peak)
    weighed = torch.ones(exponentials.shape[-2:], dtype=torch.float64)
    weighed[: len(rows), : len(rows)][rows[:, None] & rows] = rule.weight
    exponentials = exponentials * weighed
    total = exponentials.sum(-1, keepdim=True)
    if s_aux is not None:
        total = total + torch.exp(column - peak)
    weights = exponentials / total
    call.kept.append(weights)
    return (weights @ values).to(query.dtype).transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, _attention)


@contextmanager
def _calling(call: _Call) -> Iterator[None]:
    token = _call.set(call)
    try:
        yield
    finally:
        _call.reset(token)


@torch.no_grad()
def run(
    model: PreTrainedModel,
    sliding: Sequence[int | None],
    prefix: Sequence[int],
    windows: Sequence[Sequence[int]],
    query: Sequence[int],
    rule: Weighed,
) -> tuple[Tensor, Packed, list[Tensor]]:
    """(len(query), vocab) fp32 logits of the query's rows, the tokens, each layer's weights."""
    packed = pack(prefix, windows, query, rule.right)
    call = _Call(packed, rule, sliding)
    with _calling(call):
        output = dense.twin(model, NAME)(
            input_ids=packed.ids[None], position_ids=packed.positions[None], use_cache=False
        )
    return output.logits[0, packed.rows].float(), packed, call.kept


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
