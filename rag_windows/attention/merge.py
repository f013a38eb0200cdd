"""The one merge that every method shares."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def merge_weights(
    lses: Sequence[torch.Tensor], sink: torch.Tensor | None = None
) -> list[torch.Tensor]:
    """Share of the softmax over the union of segments that each segment gets.

    Args:
        lses: per segment, fp32, one shape; ``-inf`` where a segment is empty for a row.
        sink: logits of an attention sink, broadcastable to that shape: one more segment, whose
            output is zero.

    Returns:
        One weight tensor a segment, fp32. A row whose segments are all empty gets zeros, never NaN.
    """
    peak = torch.stack(tuple(lses)).amax(dim=0)
    if sink is not None:
        peak = torch.maximum(peak, sink)
    peak = peak.masked_fill(peak == -torch.inf, 0.0)
    weights = [torch.exp(lse - peak) for lse in lses]
    total = torch.stack(weights).sum(dim=0)
    if sink is not None:
        total = total + torch.exp(sink - peak)
    total = total.clamp_min(torch.finfo(total.dtype).tiny)
    return [weight / total for weight in weights]


def merge(outputs: Sequence[torch.Tensor], weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """Sum the segments' outputs (..., value dim) by their weights (...), in fp32.

    Returns:
        The mixed output in the dtype of the first segment's.
    """
    mixed = sum(
        output.to(weight.dtype) * weight.unsqueeze(-1)
        for output, weight in zip(outputs, weights, strict=True)
    )
    return torch.as_tensor(mixed).to(outputs[0].dtype)


def merge_two(outputs: Sequence[torch.Tensor], lses: Sequence[torch.Tensor]) -> torch.Tensor:
    """Mix two segments, where nobody asks for their shares: the same in fewer steps.

    Args:
        outputs: of each segment, (..., value dim).
        lses: of each, (...), fp32; no row is empty (``-inf``) in both.

    Returns:
        The mixed output in the dtype of the first segment's.
    """
    one, other = outputs
    share = torch.sigmoid(lses[0] - lses[1]).unsqueeze(-1)
    return torch.lerp(other.to(share.dtype), one.to(share.dtype), share).to(one.dtype)
