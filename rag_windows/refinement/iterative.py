"""Windows that read themselves again: forward passes that move their keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import torch

from rag_windows.kv import Window
from rag_windows.refinement.velocity import Velocity

if TYPE_CHECKING:
    from rag_windows.encoding import Encoder

Positions = Literal["continue", "reuse"]


@dataclass(frozen=True, slots=True)
class IterativeRefinement:
    """``KV_t = KV_{t-1} + eta * m_t``, ``m_t = (G_t - KV_{t-1}) + momentum * m_{t-1}``.

    For the meaning of the numbers and for what a pass ``G_t`` sees, see `DeepThinking`. The update
    is summed up in fp32 (in fp64 for fp64 models); each pass reads it rounded to the model's dtype,
    and so is what comes out.

    Attributes:
        steps: passes after the plain encoding, at least 1.
        eta: step size.
        momentum: share of the last pass's movement that goes on.
        at: where the tokens of a pass stand.
    """

    steps: int
    eta: float
    momentum: float
    at: Positions

    def positions(self, tokens: int) -> int:
        """How many positions from its start on a window of so many tokens takes."""
        return 2 * tokens if self.at == "continue" else tokens

    @torch.no_grad()
    def refine(
        self, encoder: Encoder, windows: Sequence[Window], prefix: Window | None
    ) -> list[Window]:
        """Refine each window of a batch by itself; see `rag_windows.rescaling.Refinement`."""
        ids = [window.ids for window in windows]
        starts = [
            window.start + (len(window.ids) if self.at == "continue" else 0) for window in windows
        ]
        moving = [
            [Velocity(tensor, self.eta, self.momentum) for tensor in (*window.keys, *window.values)]
            for window in windows
        ]
        now = list(windows)
        layers = len(windows[0].keys)
        for _ in range(self.steps):
            made = encoder.run(ids, starts, prefix, before=now)
            for index, (window, velocities) in enumerate(zip(made, moving, strict=True)):
                tensors = (*window.keys, *window.values)
                for velocity, tensor in zip(velocities, tensors, strict=True):
                    velocity.follow(tensor)
                moved = tuple(
                    velocity.place.to(tensor.dtype)
                    for velocity, tensor in zip(velocities, tensors, strict=True)
                )
                now[index] = replace(now[index], keys=moved[:layers], values=moved[layers:])
        return now
