"""The dense reference: one packed float64 forward of every token, attention spelled out.

All tokens of [prefix | window 1 | ... | window n | query] run through one forward of `float64`,
whose attention is a softmax over explicit log weights:

- a token of the prefix sees the prefix up to itself; a token of a window sees the prefix and its
  own window up to itself; a token of the query sees everything up to itself;
- positions: prefix 0..p-1, each window from p, query from p + longest window; or each window up to
  a multiple of `every` tokens behind p, and the query from the last of these;
- a sliding layer sees a key where position(query) - position(key) < reach;
- rows of the query weigh a context key by `logit / T - l + L`, where `l` is the logsumexp of the
  context's `logit / T` and `L` the context's rescaled one, and a key of the query as `weight` such
  keys; all other rows and keys by `logit`;
- a sink is one more weight with no value.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .float64 import Layer, Row, forward, twin

PREFIX = 0
Form = Literal["as used", "as printed", "fixed ratio"]


@dataclass(frozen=True, slots=True)
class Rule:
    """The context's rescaling: temperature T, scale S and how S enters. T = S = 1 is PCW.

    How often the query's keys count for rows of the query, and of what windows end at a multiple.
    """

    temperature: float = 1.0
    scale: float = 1.0
    form: Form = "as used"
    weight: float = 1.0
    every: int = 0

    def context_lse(self, lse: Tensor) -> Tensor:
        """The rescaled logsumexp `L` of the context, from `lse` of its `logit / T`."""
        log_scale = torch.tensor(self.scale, dtype=torch.float64).log()
        if self.form == "as used":
            return self.scale * lse
        if self.form == "as printed":
            return self.temperature * (lse + log_scale)
        return lse + log_scale


PLAIN = Rule()


@dataclass(frozen=True, slots=True)
class Packed:
    """All tokens of one call in one row: ids, positions and segments, each (tokens,) int64.

    Segment 0 is the prefix, 1..n the windows, n + 1 the query.
    """

    ids: Tensor
    positions: Tensor
    segments: Tensor
    query: int

    @property
    def rows(self) -> Tensor:
        """(tokens,) bool: the rows of the query."""
        return self.segments == self.query

    @property
    def context(self) -> Tensor:
        """(tokens,) bool: the keys of the windows."""
        return (self.segments > PREFIX) & (self.segments < self.query)

    def visible(self, reach: int | None) -> Tensor:
        """(tokens, tokens) bool: which key each row sees in a layer of this reach."""
        index = torch.arange(len(self.ids))
        row, key = self.segments[:, None], self.segments[None, :]
        seen = index[None, :] <= index[:, None]
        seen &= (key == PREFIX) | (key == row) | (row == self.query)
        if reach is not None:
            seen &= self.positions[:, None] - self.positions[None, :] < reach
        return seen


def pack(
    prefix: Sequence[int],
    windows: Sequence[Sequence[int]],
    query: Sequence[int],
    every: int = 0,
) -> Packed:
    """Lay all tokens out in one row, with the positions of the design."""
    start = len(prefix)
    ends = [start + (-(-len(own) // every) * every if every else len(own)) for own in windows]
    starts = [end - len(own) for end, own in zip(ends, windows, strict=True)]
    query_start = max(ends, default=start)
    parts = [(prefix, 0), *zip(windows, starts, strict=True), (query, query_start)]
    ids: list[int] = []
    positions: list[int] = []
    segments: list[int] = []
    for segment, (tokens, first) in enumerate(parts):
        ids += tokens
        positions += range(first, first + len(tokens))
        segments += [segment] * len(tokens)
    return Packed(
        torch.tensor(ids), torch.tensor(positions), torch.tensor(segments), len(windows) + 1
    )


def weights(logits: Tensor, sinks: Tensor | None, seen: Tensor, row: Row, rule: Rule) -> Tensor:
    """Attention weights of every row over every key, from (batch, heads, rows, keys) logits."""
    hidden = ~seen
    context = row.context & row.rows[:, None] & seen
    logits = logits.masked_fill(hidden, -torch.inf)
    inside = (logits / rule.temperature).masked_fill(~context, -torch.inf)
    lse = inside.logsumexp(-1, keepdim=True)
    # Rows that see no context have lse = -inf; any finite number keeps their arithmetic clean.
    lse = lse.masked_fill(lse.isinf(), 0.0)
    log_weights = torch.where(context, inside - lse + rule.context_lse(lse), logits)
    own = row.rows & row.rows[:, None]
    log_weights = torch.where(own, log_weights + math.log(rule.weight), log_weights)
    if sinks is not None:
        column = sinks.to(logits).view(1, -1, 1, 1).expand(*logits.shape[:3], 1)
        log_weights = torch.cat([log_weights, column], dim=-1)
    return log_weights.softmax(-1)[..., : logits.shape[-1]]


def mixed(layer: Layer, row: Row, rule: Rule) -> Tensor:
    """(1, heads, tokens, dim) output of the attention."""
    return weights(layer.logits, layer.sinks, layer.seen, row, rule) @ layer.values


def logits(
    model: PreTrainedModel,
    sliding: Sequence[int | None],
    prefix: Sequence[int],
    windows: Sequence[Sequence[int]],
    query: Sequence[int],
    rule: Rule = PLAIN,
) -> Tensor:
    """The specification: (len(query), vocab) fp32 logits of the query's rows.

    `sliding` gives the reach of each layer, None for full attention.
    """
    packed = pack(prefix, windows, query, rule.every)
    return forward(model, sliding, packed, functools.partial(mixed, row=packed, rule=rule))


@torch.no_grad()
def masked_logits(
    model: PreTrainedModel, sliding: Sequence[int | None], packed: Packed, mask_by_type: bool
) -> Tensor:
    """The same for T = S = 1 by the model's own eager attention and 4D additive masks."""
    output = twin(model, "eager")(
        input_ids=packed.ids[None],
        position_ids=packed.positions[None],
        attention_mask=masks(packed.visible, sliding, mask_by_type),
        use_cache=False,
    )
    return output.logits[0, packed.rows].float()


def masks(
    visible: Callable[[int | None], Tensor], sliding: Sequence[int | None], by_type: bool
) -> Any:
    """4D additive masks as a model takes them, of which keys are visible within a reach."""

    def additive(reach: int | None) -> Tensor:
        hidden = ~visible(reach)
        blocked = torch.zeros(hidden.shape, dtype=torch.float64)
        return blocked.masked_fill(hidden, torch.finfo(torch.float64).min)[None, None]

    if not by_type:
        return additive(sliding[0])
    reach = next((r for r in sliding if r is not None), None)
    return {"full_attention": additive(None), "sliding_attention": additive(reach)}


@torch.no_grad()
def plain_logits(model: PreTrainedModel, tokens: Sequence[int], last: int) -> Tensor:
    """(last, vocab) fp32 logits of the last rows of `tokens`, by the model without the engine."""
    output = model(input_ids=torch.tensor([list(tokens)]), use_cache=False)
    return output.logits[0, len(tokens) - last :].float()
