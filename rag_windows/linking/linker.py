"""The pass that encodes chosen tokens again, with sight of everything before them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import torch

from rag_windows.attention.layout import use_layout
from rag_windows.attention.segments import MAX_MASK
from rag_windows.device import input_device
from rag_windows.encoding import Encoder
from rag_windows.kv import Window
from rag_windows.linking.choice import chosen
from rag_windows.linking.override import RecomputeLayout
from rag_windows.linking.plan import LinkPlan


def link(
    encoder: Encoder, windows: Sequence[Window], prefix: Window | None, plan: LinkPlan
) -> tuple[list[Window], list[int]]:
    """Link the windows of one request.

    Args:
        encoder: of the model.
        windows: each encoded behind the prefix, at the positions it has in one prompt.
        prefix: what stands before the windows, or None.
        plan: how many tokens, and by which rule.

    Returns:
        The windows with the chosen tokens' fresh keys and values in the place of the old ones; what
        was given stays as it is. And of each window how many tokens those are.
    """
    if plan.nothing or len(windows) < 2:
        return list(windows), [0] * len(windows)
    indices = chosen(encoder, windows, prefix, plan)
    lengths = torch.tensor([len(window.ids) for window in windows])
    owners = torch.arange(len(windows)).repeat_interleave(lengths)[indices]
    counts = torch.bincount(owners, minlength=len(windows)).tolist()
    if not len(indices):
        return list(windows), counts
    return relink(encoder, windows, prefix, indices), counts


@torch.no_grad()
def relink(
    encoder: Encoder, windows: Sequence[Window], prefix: Window | None, indices: torch.Tensor
) -> list[Window]:
    """Encode tokens again: in each layer their new keys and values count, also for one another.

    A token attends to the prefix and to every token of the windows up to itself, whether that one
    was encoded again or not. Nothing later is seen, so a long choice is run in several passes, in
    order, and gives the same. Source: Hu et al., "EPIC", https://arxiv.org/abs/2410.15332, and Yao
    et al., "CacheBlend", https://arxiv.org/abs/2405.16444, which differ in their choice of tokens.

    Args:
        encoder: of the model.
        windows: encoded one behind the other.
        prefix: what stands before the windows, or None.
        indices: (n,) int64 on the CPU, ascending, at least one, among all windows' tokens.
    """
    before = [] if prefix is None else [prefix]
    parts = [*before, *windows]
    start = sum(len(window.ids) for window in before)
    ids = torch.tensor([token for window in parts for token in window.ids], dtype=torch.int64)
    layers = range(len(encoder.reach))
    made = RecomputeLayout(
        encoder.reach,
        [torch.cat([window.keys[layer] for window in parts], dim=1) for layer in layers],
        [torch.cat([window.values[layer] for window in parts], dim=1) for layer in layers],
    )
    device = input_device(encoder.model)
    for rows in (indices + start).split(max(1, MAX_MASK // len(ids))):
        made.take(rows)
        fed = ids[rows].unsqueeze(0).to(device)
        with use_layout(made):
            encoder.model.base_model(
                fed, position_ids=rows.unsqueeze(0).to(device), use_cache=False
            )
    # The last window's end is no beginning.
    offsets = accumulate((len(window.ids) for window in windows), initial=start)
    return [
        replace(
            window,
            keys=tuple(key[:, at : at + len(window.ids)] for key in made.keys),
            values=tuple(value[:, at : at + len(window.ids)] for value in made.values),
        )
        for at, window in zip(offsets, windows, strict=False)
    ]
