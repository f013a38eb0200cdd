"""Deep-Thinking: forward passes that move the keys and values of windows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from rag_windows.errors import LimitError
from rag_windows.kv import Window
from rag_windows.methods.steps import Refinement

Run = Callable[..., list[Window]]


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


@torch.no_grad()
def refine(
    refinement: Refinement, run: Run, windows: Sequence[Window], prefix: Window | None
) -> list[Window]:
    """Refine each window of a batch by itself.

    Args:
        refinement: its numbers.
        run: makes a forward pass over texts, see `rag_windows.prefill.Passes.run`.
        windows: as encoded behind the prefix, each at its own position.
        prefix: what they were encoded behind, or None.

    Returns:
        As many windows in the same order, of the same ids, positions and shapes.
    """
    ids = [window.ids for window in windows]
    starts = [
        window.start + (len(window.ids) if refinement.at == "continue" else 0) for window in windows
    ]
    moving = [
        [
            Velocity(tensor, refinement.eta, refinement.momentum)
            for tensor in (*window.keys, *window.values)
        ]
        for window in windows
    ]
    now = list(windows)
    layers = len(windows[0].keys)
    for _ in range(refinement.steps):
        made = run(ids, starts, prefix, before=now)
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


def check_room(
    refinement: Refinement,
    starts: Sequence[int],
    lengths: Sequence[int],
    limit: int | None,
    name: Callable[[int], str],
    shorten: str = "give windows of at most {} tokens",
) -> None:
    """Refuse windows whose further passes would stand beyond the model's positions.

    Args:
        refinement: of the method.
        starts: position of each window's first token.
        lengths: tokens of each window.
        limit: positions that the model has, or None for no limit.
        name: how the error calls a window, by its index.
        shorten: what else helps, with a place for the number of tokens that fit.

    Raises:
        LimitError: naming the first window that does not fit, and what to do.
    """
    if limit is None:
        return
    for index, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        needed = refinement.positions(length)
        if needed > length and start + needed > limit:
            fitting = max(0, (limit - start) * length // needed)
            raise LimitError(
                f"{name(index)} has {length} tokens from position {start} on, and the passes that "
                f"refine it stand behind it: they reach {start + needed} positions, and the model "
                f"has {limit}. Use positions='reuse', or {shorten.format(fitting)}."
            )
