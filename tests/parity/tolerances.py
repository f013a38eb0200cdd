"""Every tolerance of the parity tests, in one place, with where it comes from."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

FP32 = 1e-5
"""Largest absolute difference of fp32 logits, for logits whose root mean square is at most 1."""

GOLDEN = 1e-4
"""Largest absolute difference to the stored fp32 logits of the released APE code."""

BF16_FACTOR = 3.0
"""How many times the model's own bf16 error the engine's bf16 error may be."""

MATTERS = 1e-3
"""A method's T and S must move some logit by more than this, or a parity test could not fail."""


def fp32(reference: Tensor) -> float:
    """Absolute tolerance for fp32 logits: `FP32`, times the logits' scale where that is above 1.

    Rounding is relative: logits that are ten times as large have ten times the absolute error.
    """
    return FP32 * max(1.0, reference.double().square().mean().sqrt().item())


def gap(actual: Tensor, reference: Tensor) -> float:
    """Largest absolute difference, as a float; NaN anywhere gives infinity, shapes must agree."""
    if actual.shape != reference.shape:
        raise ValueError(f"shapes differ: {tuple(actual.shape)} and {tuple(reference.shape)}")
    difference = (actual.double() - reference.double()).abs()
    if not bool(torch.isfinite(difference).all()):
        return float("inf")
    return difference.max().item() if difference.numel() else 0.0


def rms(actual: Tensor, reference: Tensor) -> float:
    """Root mean square of the difference; infinity where one is not finite."""
    difference = actual.double() - reference.double()
    if not bool(torch.isfinite(difference).all()):
        return float("inf")
    return difference.square().mean().sqrt().item()


def agree(actual: Tensor, reference: Tensor) -> None:
    """Refuse fp32 logits that are not those of the reference."""
    assert gap(actual, reference) <= fp32(reference)


def agree_in_bf16(
    actual: Tensor,
    reference: Tensor,
    model: PreTrainedModel,
    exact: PreTrainedModel,
    tokens: Sequence[int],
) -> None:
    """Refuse bf16 logits further from the reference than the model's own are from exact ones.

    Rounding may send a token to another expert, which is another computation: where there are
    experts, the row that is furthest off does not count.
    """
    if any(getattr(model.config, name, None) for name in ("num_experts", "num_local_experts")):
        kept = (actual - reference).abs().amax(dim=-1).argsort()[:-1]
        actual, reference = actual[kept], reference[kept]
    ids = torch.tensor([list(tokens)])
    with torch.no_grad():
        own, own_exact = (one(input_ids=ids).logits[0].float() for one in (model, exact))
    assert rms(actual, reference) <= BF16_FACTOR * rms(own, own_exact)
    assert gap(actual, reference) <= BF16_FACTOR * gap(own, own_exact)
