"""What one layer of a batch asks of the stacks."""

from __future__ import annotations

import torch

from rag_windows.attention.backends import Request, attend
from rag_windows.batch.plan import Read

MAX_MASK = 2**25
"""Rows x keys of one kernel call that needs a mask: what that, and on a CPU its bias, may take."""

Part = tuple[torch.Tensor, torch.Tensor]
"""Output (tokens, heads, value dim) and lse (tokens, heads)."""


class Ask:
    """One layer of a pass.

    Attributes:
        positions: (tokens,) int64, on the CPU.
        layer: its number.
        query: (tokens, heads, head dim).
        scale: multiplies the logits.
        softcap: caps them, or None.
        reach: positions that a token sees, or None for all.
    """

    __slots__ = ("layer", "positions", "query", "reach", "scale", "softcap")

    def __init__(
        self,
        positions: torch.Tensor,
        layer: int,
        query: torch.Tensor,
        scale: float,
        softcap: float | None,
        reach: int | None,
    ) -> None:
        self.positions = positions
        self.layer = layer
        self.query = query
        self.scale = scale
        self.softcap = softcap
        self.reach = reach

    def read(self, read: Read) -> Part:
        """Tokens over a stack: heads of one kv head and all tokens are rows of one kernel call."""
        query = self.chosen(read.tokens)
        if self._beyond(read):
            value = read.stack.values[self.layer]
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
        made = [
            self._rows(read, query[at : at + step], None if mask is None else mask[at : at + step])
            for at in range(0, len(query), step)
        ]
        if len(made) == 1:
            return made[0]
        return torch.cat([one[0] for one in made]), torch.cat([one[1] for one in made])

    def chosen(self, tokens: torch.Tensor) -> torch.Tensor:
        """Queries (m, heads, head dim) of some tokens."""
        if len(tokens) == len(self.query):
            return self.query
        return self.query[tokens.to(self.query.device)]

    def mask(self, read: Read, tokens: torch.Tensor) -> torch.Tensor | None:
        """Bool (m, keys): what each of some tokens sees of a stack; None for all."""
        stack, reach = read.stack, self.reach
        if reach is None:
            return None
        positions = self.positions[tokens.cpu()]
        if len(positions) and int(positions.max()) - stack.first_position < reach:
            return None
        device = self.query.device
        return positions.to(device).unsqueeze(-1) - stack.positions.to(device) < reach

    def _beyond(self, read: Read) -> bool:
        """Whether no token reaches any key of a stack."""
        if self.reach is None:
            return False
        nearest = int(self.positions[read.tokens.cpu()].min())
        return nearest - read.stack.last_position >= self.reach

    def _rows(self, read: Read, query: torch.Tensor, mask: torch.Tensor | None) -> Part:
        key, value = read.stack.keys[self.layer], read.stack.values[self.layer]
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
                temperature=read.temperature,
                softcap=self.softcap,
                mask=None if mask is None else mask.repeat(groups, 1),
            )
        )
        output = output[0].unflatten(1, (groups, tokens)).flatten(0, 1).transpose(0, 1)
        return output, lse[0].unflatten(1, (groups, tokens)).flatten(0, 1).transpose(0, 1)
