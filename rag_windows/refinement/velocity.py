"""One tensor that moves towards others, with momentum."""

from __future__ import annotations

import torch


class Velocity:
    """A place that follows targets: ``m = (target - place) + momentum * m; place += eta * m``.

    Args:
        place: where it starts; a copy is kept, in fp32 or in fp64 for fp64 tensors.
        eta: step size.
        momentum: 0 keeps no velocity in memory.

    Attributes:
        place: where it is.
    """

    __slots__ = ("_eta", "_momentum", "_moving", "place")

    def __init__(self, place: torch.Tensor, eta: float, momentum: float) -> None:
        exact = torch.promote_types(place.dtype, torch.float32)
        self.place = place.to(exact, copy=True)
        self._eta = eta
        self._momentum = momentum
        self._moving: torch.Tensor | None = None

    def follow(self, target: torch.Tensor) -> None:
        """Move once; ``target`` has the place's shape, in any float dtype."""
        moving = target.to(self.place.dtype) - self.place
        if self._momentum:
            if self._moving is not None:
                moving.add_(self._moving, alpha=self._momentum)
            self._moving = moving
        self.place.add_(moving, alpha=self._eta)
