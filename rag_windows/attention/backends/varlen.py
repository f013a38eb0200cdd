"""PyTorch's fused CUDA attention over texts of unlike length, all in one call."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache, lru_cache
from itertools import accumulate

import torch

from rag_windows.attention.backends import reference
from rag_windows.attention.backends.cuda import MAX_HEAD_DIM
from rag_windows.attention.backends.request import Request

logger = logging.getLogger(__name__)

TOLERANCE = {torch.float16: 5e-3, torch.bfloat16: 3e-2}
"""Of outputs, by dtype; and what `serves` takes."""

LSE_TOLERANCE = 5e-3
DEVICE = "cuda"


def serves(
    lengths: Sequence[int],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    softcap: float | None,
    reach: int | None,
) -> bool:
    """Whether one call computes this, and rightly on this device; arguments as for `attend`."""
    dim = key.shape[-1]
    return (
        len(lengths) > 1
        and min(lengths) > 0
        and softcap is None
        and query.device.type == DEVICE
        and query.dtype in TOLERANCE
        and dim == value.shape[-1]
        and dim <= MAX_HEAD_DIM
        and dim % 8 == 0
        and query.shape[0] == 1
        and query.stride(-1) == key.stride(-1) == value.stride(-1) == 1
        and _agrees(query.device, query.dtype, dim, reach is not None)
    )


def attend(
    lengths: Sequence[int],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    reach: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention of each of several texts over itself alone.

    Args:
        lengths: tokens of each, in the order in which they stand one behind the other.
        query: (1, heads, tokens, head dim).
        key: (1, kv heads, tokens, head dim).
        value: (1, kv heads, tokens, value dim).
        scale: multiplies the logits.
        reach: positions that a token sees, itself included, or None for all.

    Returns:
        Output (1, heads, tokens, value dim) in the query's dtype and lse (1, heads, tokens), fp32.
    """
    bounds = _bounds(tuple(lengths), query.device)
    longest = max(lengths)
    output, lse = _flash(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        bounds,
        bounds,
        longest,
        longest,
        reach is None,
        scale,
        -1 if reach is None else reach - 1,
        -1 if reach is None else 0,
    )
    return output.transpose(0, 1).unsqueeze(0), lse.unsqueeze(0)


def _flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_bounds: torch.Tensor,
    key_bounds: torch.Tensor,
    most_rows: int,
    most_keys: int,
    causal: bool,
    scale: float,
    left: int,
    right: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The operator behind ``torch.nn.attention.varlen``, whose import takes seconds.

    Returns:
        Output (tokens, heads, value dim) and lse (heads, tokens).
    """
    output, lse, *_ = torch.ops.aten._flash_attention_forward(
        query,
        key,
        value,
        query_bounds,
        key_bounds,
        most_rows,
        most_keys,
        0.0,
        causal,
        False,
        scale=scale,
        window_size_left=left,
        window_size_right=right,
    )
    return output, lse


@lru_cache(maxsize=8)
def _bounds(lengths: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """(texts + 1,) int32: where each begins and the last ends; the layers of a pass share it."""
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)


@cache
def _agrees(device: torch.device, dtype: torch.dtype, dim: int, slides: bool) -> bool:
    """Ask for three short texts on this device and compare each with the reference.

    A kernel that fails or answers otherwise is left out, and texts of equal length share a call
    instead: a backend may never change what comes out.
    """
    lengths, heads, kv_heads = (5, 1, 33), 4, 2
    reach = 7 if slides else None
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(1, n, sum(lengths), dim, generator=generator).to(device, dtype)
        for n in (heads, kv_heads, kv_heads)
    )
    try:
        answers = attend(lengths, query, key, value, dim**-0.5, reach)
    except RuntimeError as error:
        logger.warning("The fused attention over many texts is left out on %s: %s", device, error)
        return False
    mask = same_text(lengths, reach).to(device)
    expected = reference.attend(Request(query, key, value, dim**-0.5, mask=mask))
    right = all(
        answer.shape == wanted.shape
        and torch.allclose(answer.float(), wanted.float(), atol=tolerance)
        for answer, wanted, tolerance in zip(
            answers, expected, (TOLERANCE[dtype], LSE_TOLERANCE), strict=True
        )
    )
    if not right:
        logger.warning("The fused attention over many texts differs from the reference: %s", device)
    return right


def same_text(lengths: Sequence[int], reach: int | None) -> torch.Tensor:
    """(tokens, tokens) bool: what each token sees of its own text."""
    texts = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    index = torch.arange(len(texts))
    distance = index.unsqueeze(-1) - index
    near = distance < (len(texts) if reach is None else reach)
    return (texts.unsqueeze(-1) == texts) & (distance >= 0) & near
