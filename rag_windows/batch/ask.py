"""What one layer of a batch asks of the stacks."""

from __future__ import annotations

import torch

from rag_windows.attention.backends import Request, attend
from rag_windows.batch.read import Read
from rag_windows.batch.scratch import Scratch
from rag_windows.batch.sight import Sight

MAX_MASK = 2**25
"""Rows x keys of one kernel call that needs a mask: what that, and on a CPU its bias, may take."""

Part = tuple[torch.Tensor, torch.Tensor]
"""Output (tokens, heads, value dim) and lse (tokens, heads)."""


class Ask:
    """One layer of a pass.

    Attributes:
        layer: its number.
        query: (tokens, heads, head dim).
        scale: multiplies the logits.
        softcap: caps them, or None.
        reach: positions that a token sees, or None for all.
        sight: of the pass.

    Args:
        layer: see there, as for the next four.
        query: see there.
        scale: see there.
        softcap: see there.
        reach: see there.
        sight: see there.
        scratch: of the pass.
    """

    __slots__ = ("_scratch", "layer", "query", "reach", "scale", "sight", "softcap")

    def __init__(
        self,
        layer: int,
        query: torch.Tensor,
        scale: float,
        softcap: float | None,
        reach: int | None,
        sight: Sight,
        scratch: Scratch,
    ) -> None:
        self.layer = layer
        self.query = query
        self.scale = scale
        self.softcap = softcap
        self.reach = reach
        self.sight = sight
        self._scratch = scratch

    def read(self, read: Read) -> Part:
        """Tokens over a stack: heads of one kv head and all tokens are rows of one kernel call."""
        query = self._chosen(read.tokens)
        if self.sight.nothing(read, self.reach):
            value = read.stack.segments[self.layer][0][1]
            shape = query.shape[:2]
            exact = torch.promote_types(query.dtype, torch.float32)
            return (
                query.new_zeros(*shape, value.shape[-1]),
                query.new_full(shape, -torch.inf, dtype=exact),
            )
        mask = self.mask(read, read.tokens)
        step = len(query)
        if mask is not None:
            step = max(1, MAX_MASK // (mask.shape[1] * query.shape[1]))
        key, value = read.stack.joined(self.layer, self._scratch)
        made = [
            self._rows(
                query[at : at + step],
                key,
                value,
                read.temperature,
                None if mask is None else mask[at : at + step],
            )
            for at in range(0, len(query), step)
        ]
        if len(made) == 1:
            return made[0]
        return torch.cat([one[0] for one in made]), torch.cat([one[1] for one in made])

    def mask(self, read: Read, tokens: torch.Tensor) -> torch.Tensor | None:
        """See `Sight.mask`."""
        return self.sight.mask(read, tokens, self.reach, self.query.device)

    def _chosen(self, tokens: torch.Tensor) -> torch.Tensor:
        """Queries (m, heads, head dim) of some tokens."""
        if len(tokens) == len(self.query):
            return self.query
        return self.query[tokens.to(self.query.device)]

    def _rows(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        temperature: float,
        mask: torch.Tensor | None,
    ) -> Part:
        tokens, heads, _ = query.shape
        kv_heads = key.shape[0]
        groups = heads // kv_heads
        # (tokens, heads) -> (kv heads, groups * tokens)
        folded = query.transpose(0, 1).unflatten(0, (kv_heads, groups)).flatten(1, 2)
        output, lse = attend(
            Request(
                folded.unsqueeze(0),
                key.unsqueeze(0),
                value.unsqueeze(0),
                self.scale,
                temperature=temperature,
                softcap=self.softcap,
                mask=None if mask is None else mask.repeat(groups, 1),
            )
        )
        output = output[0].unflatten(1, (groups, tokens)).flatten(0, 1).transpose(0, 1)
        return output, lse[0].unflatten(1, (groups, tokens)).flatten(0, 1).transpose(0, 1)
