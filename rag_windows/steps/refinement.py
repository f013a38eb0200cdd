"""Deep-Thinking: forward passes that move the keys and values of windows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from rag_windows.errors import LimitError
from rag_windows.kv import Window
from rag_windows.methods import DeepThinking

Run = Callable[..., list[Window]]


@torch.no_grad()
def refine(
    refinement: DeepThinking, run: Run, windows: Sequence[Window], prefix: Window | None
) -> list[Window]:
    """Refine each window of a batch by itself; ``run`` is `rag_windows.prefill.Encoder.run`."""
    ids = [window.ids for window in windows]
    behind = refinement.positions == "continue"
    starts = [window.end if behind else window.start for window in windows]
    exact = torch.promote_types(windows[0].keys[0].dtype, torch.float32)
    states = [[t.to(exact, copy=True) for t in (*w.keys, *w.values)] for w in windows]
    speeds: dict[tuple[int, int], torch.Tensor] = {}
    now = list(windows)
    layers = len(windows[0].keys)
    for _ in range(refinement.steps):
        for index, window in enumerate(run(ids, starts, prefix, before=now)):
            targets = (*window.keys, *window.values)
            for place, (state, target) in enumerate(zip(states[index], targets, strict=True)):
                moving = target.to(exact) - state
                if refinement.momentum:
                    if (index, place) in speeds:
                        moving.add_(speeds[index, place], alpha=refinement.momentum)
                    speeds[index, place] = moving
                state.add_(moving, alpha=refinement.eta)
            pairs = zip(states[index], targets, strict=True)
            moved = tuple(state.to(target.dtype) for state, target in pairs)
            now[index] = replace(now[index], keys=moved[:layers], values=moved[layers:])
    return now


def check_room(
    refinement: DeepThinking,
    starts: Sequence[int],
    lengths: Sequence[int],
    limit: int | None,
    name: Callable[[int], str],
) -> None:
    """Refuse windows whose further passes would stand beyond the model's positions.

    ``name`` is how the error calls a window, by its index.

    Raises:
        LimitError: naming the first window that does not fit, and what to do.
    """
    if limit is None or refinement.positions == "reuse":
        return
    for index, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        end = start + 2 * length
        if end > limit:
            fitting = max(0, (limit - start) // 2)
            raise LimitError(
                f"{name(index)} has {length} tokens from position {start} on, and the passes that "
                f"refine it stand behind it: they reach {end} positions, and the model has {limit}."
                f" Use positions='reuse', or windows of at most {fitting} tokens."
            )
