"""How far the tokens of a pass stand from what they read."""

from __future__ import annotations

import torch

from rag_windows.batch.read import Read


class Sight:
    """What layers that reach only so far back see of stacks, in one pass.

    Args:
        positions: (tokens,) int64, on the CPU.
    """

    def __init__(self, positions: torch.Tensor) -> None:
        self._positions = positions
        self._extremes: dict[int, tuple[int, int]] = {}

    def whole(self, read: Read, reach: int | None) -> bool:
        """Whether every token sees all of a stack.

        Args:
            read: of the pass's plan.
            reach: positions that a token sees, or None for all.
        """
        return reach is None or self._extreme(read)[1] - read.stack.first_position < reach

    def nothing(self, read: Read, reach: int | None) -> bool:
        """Whether no token reaches any key of a stack."""
        return reach is not None and self._extreme(read)[0] - read.stack.last_position >= reach

    def mask(
        self, read: Read, tokens: torch.Tensor, reach: int | None, device: torch.device
    ) -> torch.Tensor | None:
        """What each of some tokens sees of a stack.

        Args:
            read: of the pass's plan.
            tokens: (m,) int64, some of its.
            reach: positions that a token sees, or None for all.
            device: where the mask is to be.

        Returns:
            Bool (m, keys); None for all.
        """
        if reach is None or self.whole(read, reach):
            return None
        positions = self._positions[tokens.cpu()].to(device)
        return positions.unsqueeze(-1) - read.stack.positions.to(device) < reach

    def _extreme(self, read: Read) -> tuple[int, int]:
        """The smallest and the largest position of a read's tokens."""
        found = self._extremes.get(id(read))
        if found is None:
            positions = self._positions[read.tokens.cpu()]
            found = self._extremes[id(read)] = int(positions.min()), int(positions.max())
        return found
