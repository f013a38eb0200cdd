"""Linking, spelled out: one float64 forward that holds old and fresh rows of the windows.

The row is [prefix | windows as encoded alone | the chosen tokens once more | query]. Windows stand
one behind the other; a chosen token's second copy stands at the same position as its first. What
each row sees:

- prefix: the prefix up to itself; a window's token: the prefix and its own window up to itself;
- a chosen token's copy and the query: the prefix, and every token of the windows at a position up
  to their own: its copy where it has one, else itself; the query also itself.

All else is as in `dense`. Every layer's copies are computed from that layer's copies, in one pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedModel

from . import dense
from .cases import Case
from .dense import PLAIN, Rule
from .float64 import Layer, forward


@dataclass(frozen=True, slots=True)
class LinkedRow:
    """All tokens of one call: (tokens,) each. Kinds: 0 prefix, 1 window, 2 copy, 3 query."""

    ids: Tensor
    positions: Tensor
    kinds: Tensor
    windows: Tensor
    replaced: Tensor
    keys: dict[int, Tensor] = field(default_factory=dict)

    @property
    def rows(self) -> Tensor:
        """(tokens,) bool: the rows of the query."""
        return self.kinds == 3

    @property
    def context(self) -> Tensor:
        """(tokens,) bool: keys of the windows that the query may read."""
        return (self.kinds == 2) | ((self.kinds == 1) & ~self.replaced)

    def visible(self, reach: int | None) -> Tensor:
        """(tokens, tokens) bool: which key each row sees in a layer of this reach."""
        row, key = self.kinds[:, None], self.kinds[None, :]
        before = self.positions[None, :] <= self.positions[:, None]
        own = (row == 1) & (key == 1) & (self.windows[:, None] == self.windows[None, :])
        linked = ((row == 2) | (row == 3)) & (self.context | self.rows)[None, :]
        seen = before & ((key == 0) | own | linked)
        if reach is not None:
            seen &= self.positions[:, None] - self.positions[None, :] < reach
        return seen


def lay_out(one: Case, chosen: Sequence[int]) -> LinkedRow:
    """The row of a case; `chosen` indexes all windows' tokens."""
    prefix = len(one.prefix)
    flat = [token for window in one.windows for token in window]
    picked = sorted(chosen)
    total = prefix + len(flat)
    owners = [i for i, window in enumerate(one.windows) for _ in window]
    none = [-1] * (len(picked) + len(one.query))
    replaced = [False] * total + [False] * len(none)
    for index in picked:
        replaced[prefix + index] = True
    return LinkedRow(
        ids=torch.tensor([*one.prefix, *flat, *(flat[i] for i in picked), *one.query]),
        positions=torch.tensor(
            [*range(total), *(prefix + i for i in picked), *range(total, total + len(one.query))]
        ),
        kinds=torch.tensor(
            [0] * prefix + [1] * len(flat) + [2] * len(picked) + [3] * len(one.query)
        ),
        windows=torch.tensor([-1] * prefix + owners + none),
        replaced=torch.tensor(replaced),
    )


def run(
    model: PreTrainedModel,
    sliding: Sequence[int | None],
    one: Case,
    chosen: Sequence[int],
    rule: Rule = PLAIN,
) -> tuple[Tensor, LinkedRow]:
    """The specification: (len(query), vocab) fp32 logits, and the row with every layer's keys."""
    row = lay_out(one, chosen)

    def mixed(layer: Layer) -> Tensor:
        row.keys[layer.index] = layer.key[0]
        return dense.mixed(layer, row, rule)

    return forward(model, sliding, row, mixed), row


def deviations(
    model: PreTrainedModel, sliding: Sequence[int | None], one: Case, layer: int = 1
) -> Tensor:
    """(tokens of the windows,) squared distance of keys seen alone and keys seen with all."""
    total = sum(len(window) for window in one.windows)
    _, row = run(model, sliding, one, range(total))
    alone, together = row.keys[layer][:, row.kinds == 1], row.keys[layer][:, row.kinds == 2]
    return (together - alone).square().sum(dim=(0, 2))
