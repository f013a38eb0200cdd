"""Windows that change after they were encoded: selective recompute, and Deep-Thinking's passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import accumulate
from typing import Protocol

import torch
from transformers import PreTrainedModel

from rag_windows.attention.backends import MAX_MASK
from rag_windows.attention.layout import AllCaptured, Capture, Layout, TextsLayout, use_layout
from rag_windows.attention.segments import Reading, Rows, Segment, Segments
from rag_windows.errors import LimitError
from rag_windows.kv import Window
from rag_windows.loading import input_device
from rag_windows.methods import DeepThinking, Linked


class RecomputeLayout(Layout):
    """Keys and values of one context, some of which forward passes replace.

    Token ``i`` stands at position ``i``: the prefix, then the windows one behind the other. The fed
    tokens, ``rows`` (n,) int64, ascending, on the CPU, see every token up to themselves, whether
    that one is fed or not. ``keys`` and ``values`` (kv heads, tokens, dim) by layer are written to.
    """

    def __init__(
        self,
        sliding_windows: tuple[int | None, ...],
        rows: torch.Tensor,
        keys: Sequence[torch.Tensor],
        values: Sequence[torch.Tensor],
    ) -> None:
        self.sliding_windows = sliding_windows
        self._rows, self._keys, self._values = rows, keys, values
        self._segment = Segment("query", 0, int(rows[-1]), seen=rows + 1)
        self._reading = Reading(Rows(rows), [Segments([self._segment], len(rows))])

    def reading(
        self, layer: int, batch: int, rows: int, key: torch.Tensor, value: torch.Tensor
    ) -> Reading:
        """Replace the fed tokens' keys and values, and say what they read."""
        keys, values = self._keys[layer], self._values[layer]
        fed, seen = self._rows.to(key.device), self._segment.last + 1
        keys.index_copy_(1, fed, key[0])
        values.index_copy_(1, fed, value[0])
        self._segment.layers = {layer: [(keys[None, :, :seen], values[None, :, :seen])]}
        return self._reading


class Encoding(Protocol):
    """What is read of an encoder here: its model, and the sliding windows of its layers."""

    sliding_windows: tuple[int | None, ...]

    @property
    def model(self) -> PreTrainedModel:
        """What encodes."""


LAYER = 1
"""The first layer whose keys can deviate: those of layer 0 depend on token and position only."""


@torch.no_grad()
def key_deviation(
    encoder: Encoding, windows: Sequence[Window], prefix: Window | None
) -> torch.Tensor:
    """Squared distance of each token's key in the second layer to the one it has when it sees all.

    All tokens pass through the first layer once, as in an ordinary prompt, and no further: the
    first step of CacheBlend, which may compare anew in each further layer and keep fewer and fewer
    tokens. That saves the later layers' work on those that it drops. Here every layer of a pass has
    the same tokens, so nothing would be saved, and keys that are known would be left out.

    Returns:
        (tokens of all windows,) fp32 on the CPU.
    """
    start = 0 if prefix is None else len(prefix.ids)
    ids = [token for window in windows for token in window.ids]
    capture = Capture(LAYER)
    layout = TextsLayout(encoder.sliding_windows, [len(ids)], [start], prefix, capture=capture)
    device = input_device(encoder.model)
    rows = torch.tensor([ids], dtype=torch.int64, device=device)
    positions = layout.positions.unsqueeze(0).to(device)
    with use_layout(layout), suppress(AllCaptured):
        encoder.model.base_model(rows, position_ids=positions, use_cache=False)
    old = torch.cat([window.keys[LAYER] for window in windows], dim=1)
    difference = capture.keys[LAYER][0].float() - old.float()
    return difference.square().sum(dim=(0, 2)).cpu()


def chosen(
    encoder: Encoding,
    windows: Sequence[Window],
    prefix: Window | None,
    plan: Linked,
    attention: torch.Tensor | None = None,
) -> torch.Tensor:
    """(n,) int64, ascending: which of all windows' tokens to encode again; none of the first.

    ``attention`` is as in `recompute`.
    """
    lengths = [len(window.ids) for window in windows]
    counts, behind = plan.counts(lengths), lengths[0]
    scores = attention
    if plan.choose == "deviation" and len(encoder.sliding_windows) > LAYER:
        scores = key_deviation(encoder, windows, prefix)
    if scores is not None:
        # A stable order makes the choice the same on every run where tokens tie.
        order = torch.sort(scores[behind:], descending=True, stable=True).indices
        return torch.sort(order[: sum(counts[1:])]).values + behind
    starts = accumulate(lengths[:-1])
    firsts = zip(starts, counts[1:], strict=True)
    return torch.cat([torch.arange(start, start + count) for start, count in firsts])


def recompute(
    encoder: Encoding,
    windows: Sequence[Window],
    prefix: Window | None,
    plan: Linked,
    attention: torch.Tensor | None = None,
) -> tuple[list[Window], list[int]]:
    """Encode some tokens of one request again, in sight of what stands before them.

    Args:
        attention: (tokens of all windows,) on the CPU, what the query pays each; where the plan
            chooses by it.

    Returns:
        The windows with the chosen tokens' fresh keys and values in the place of the old ones; what
        was given stays as it is. And of each window how many tokens those are.
    """
    indices = torch.empty(0, dtype=torch.int64)
    if len(windows) > 1:
        indices = chosen(encoder, windows, prefix, plan, attention)
    lengths = torch.tensor([len(window.ids) for window in windows])
    owners = torch.arange(len(windows)).repeat_interleave(lengths)[indices]
    counts = torch.bincount(owners, minlength=len(windows)).tolist()
    made = encode_again(encoder, windows, prefix, indices) if len(indices) else list(windows)
    return made, counts


@torch.no_grad()
def encode_again(
    encoder: Encoding, windows: Sequence[Window], prefix: Window | None, indices: torch.Tensor
) -> list[Window]:
    """Encode tokens again: in each layer their new keys and values count, also for one another.

    A token attends to the prefix and to every token of the windows up to itself, whether that one
    was encoded again or not. Nothing later is seen, so a long choice is run in several passes, in
    order, and gives the same.
    """
    parts = [*([] if prefix is None else [prefix]), *windows]
    start = 0 if prefix is None else len(prefix.ids)
    ids = torch.tensor([token for window in parts for token in window.ids], dtype=torch.int64)
    layers = range(len(encoder.sliding_windows))
    keys = [torch.cat([window.keys[layer] for window in parts], dim=1) for layer in layers]
    values = [torch.cat([window.values[layer] for window in parts], dim=1) for layer in layers]
    device = input_device(encoder.model)
    for rows in (indices + start).split(max(1, MAX_MASK // len(ids))):
        fed, positions = (one.unsqueeze(0).to(device) for one in (ids[rows], rows))
        with use_layout(RecomputeLayout(encoder.sliding_windows, rows, keys, values)):
            encoder.model.base_model(fed, position_ids=positions, use_cache=False)
    made = []
    for window in windows:
        place = slice(start, start + len(window.ids))
        own = (tuple(tensor[:, place] for tensor in whole) for whole in (keys, values))
        made.append(window.holding([one for part in own for one in part]))
        start = place.stop
    return made


Run = Callable[..., list[Window]]


@torch.no_grad()
def refine(
    refinement: DeepThinking, run: Run, windows: Sequence[Window], prefix: Window | None
) -> list[Window]:
    """Refine each window of a pass by itself; ``run`` is `ModelEncoder.run`."""
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


def check_passes(
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
                f"{name(index)} has {length} tokens from position {start} on. The passes that "
                f"refine it reach {end} positions, but the model has {limit}. Use "
                f"positions='reuse', or windows of at most {fitting} tokens."
            )
