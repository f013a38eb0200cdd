"""How much each token's keys depend on the windows before its own."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import torch

from rag_windows.attention.layout import AllCaptured, Capture, TextsLayout, use_layout
from rag_windows.device import input_device
from rag_windows.encoding import Encoder
from rag_windows.kv import Window

LAYER = 1
"""The first layer whose keys can deviate: those of layer 0 depend on token and position only."""


@torch.no_grad()
def key_deviation(
    encoder: Encoder, windows: Sequence[Window], prefix: Window | None
) -> torch.Tensor:
    """Squared distance of each token's key in the second layer to the one it has when it sees all.

    All tokens pass through the first layer once, as in an ordinary prompt, and no further. Source:
    Yao et al., "CacheBlend", https://arxiv.org/abs/2405.16444 (tokens of high KV deviation). The
    paper compares anew in each layer and narrows its choice on the way; this is its first step.

    Args:
        encoder: of the model; it has at least two layers.
        windows: encoded one behind the other.
        prefix: what stands before the windows, or None.

    Returns:
        (tokens of all windows,) fp32 on the CPU, summed over kv heads and head dim.
    """
    start = 0 if prefix is None else len(prefix.ids)
    ids = [token for window in windows for token in window.ids]
    capture = Capture(LAYER)
    layout = TextsLayout(encoder.reach, [len(ids)], [start], prefix, capture=capture)
    device = input_device(encoder.model)
    rows = torch.tensor([ids], dtype=torch.int64, device=device)
    positions = layout.positions.unsqueeze(0).to(device)
    with use_layout(layout), suppress(AllCaptured):
        encoder.model.base_model(rows, position_ids=positions, use_cache=False)
    old = torch.cat([window.keys[LAYER] for window in windows], dim=1)
    difference = capture.keys[LAYER][0].float() - old.float()
    return difference.square().sum(dim=(0, 2)).cpu()
