"""Rows over many keys on a CPU, in C, where its compiled kernel agrees with the reference."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from functools import cache

import torch

from rag_windows.attention.backends import reference
from rag_windows.attention.backends.choice import names
from rag_windows.attention.backends.request import Request
from rag_windows.attention.native.building import ELEMENTS, kernel
from rag_windows.attention.native.calling import call
from rag_windows.attention.native.items import Items, Reading, sizes_fit

logger = logging.getLogger(__name__)

MOST_ROWS = 16
"""Tokens times query heads of a kv head, where the kernel is made for few; with more, PyTorch's is
as fast or faster."""

LEAST_KEYS = 1024
"""Below, what a call costs by itself outweighs what the kernel saves."""

LEAST_TOKENS = 128
"""The same, of texts that see themselves alone: tokens of all."""

_TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
_LSE_TOLERANCE = 1e-4


def active() -> bool:
    """Whether it is asked in this thread or task."""
    return "native" in names("cpu")


def serves(request: Request) -> bool:
    """Whether the kernel computes this request, and does so rightly on this machine."""
    query, key, value = request.query, request.key, request.value
    groups = query.shape[1] // key.shape[1]
    return (
        request.mask is None
        and not request.causal
        and query.shape[0] == 1
        and key.shape[2] >= LEAST_KEYS
        and reads(query.dtype, key[0], value[0])
        and query.shape[2] * groups <= most_rows(query.dtype, key.shape[-1], value.shape[-1])
        and query.stride(-1) == 1
        and not (torch.is_grad_enabled() and _differentiated(query, key, value))
    )


def reads(dtype: torch.dtype, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether the kernel reads such keys (kv heads, keys, head dim) and values."""
    return (
        key.device.type == "cpu"
        and dtype == key.dtype == value.dtype
        and key.stride(-1) == value.stride(-1) == 1
        and key.shape[1] > 0
        and available(dtype, key.shape[-1], value.shape[-1])
    )


def available(dtype: torch.dtype, dim: int, value_dim: int) -> bool:
    """Whether there is a kernel of these sizes, and agrees with the reference."""
    return (
        dtype in ELEMENTS
        and sizes_fit(dim, value_dim)
        and kernel(dtype, dim, value_dim) is not None
        and _agrees(dtype, dim, value_dim)
    )


def most_rows(dtype: torch.dtype, dim: int, value_dim: int) -> float:
    """Tokens times query heads of a kv head for which it is the fastest; ``inf`` for any number."""
    made = kernel(dtype, dim, value_dim)
    return math.inf if made is not None and made.many else MOST_ROWS


def attend(request: Request) -> tuple[torch.Tensor, torch.Tensor]:
    """Same contract as the reference."""
    rows = request.query.shape[2]
    reading = Reading(
        [(request.key[0], request.value[0])],
        range(rows),
        request.scale,
        request.softcap,
        request.temperature,
    )
    output, lse = call(Items([reading]), request.query[0].transpose(0, 1))
    return output.transpose(0, 1).unsqueeze(0), lse.transpose(0, 1).unsqueeze(0)


def takes(
    query: torch.Tensor,
    parts: Sequence[tuple[torch.Tensor, torch.Tensor]],
    rows: int,
    *,
    causal: bool,
) -> bool:
    """Whether the kernel answers for a segment, and rightly on this machine.

    Args:
        query: (tokens, heads, head dim).
        parts: keys (groups, kv heads, keys, head dim) and values of the segment.
        rows: tokens of a group times query heads of a kv head.
        causal: whether the i-th token of a group sees the first i + 1 keys alone.
    """
    key, value = parts[0]
    if not all(len(k) > 0 and reads(query.dtype, k[0], v[0]) for k, v in parts):
        return False
    most = most_rows(query.dtype, key.shape[-1], value.shape[-1])
    return (
        rows <= most
        and (not causal or most == math.inf)
        and query.stride(-1) == 1
        and not (torch.is_grad_enabled() and _differentiated(query, key, value))
    )


def pays(readings: Sequence[Reading]) -> bool:
    """Whether a call is worth what it costs by itself, or several readings share it."""
    if not readings:
        return False
    if all(one.causal for one in readings):
        return sum(len(one.tokens) for one in readings) >= LEAST_TOKENS
    return len(readings) > 1 or sum(k.shape[1] for k, _ in readings[0].segments) >= LEAST_KEYS


def attend_items(items: Items, query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of a query's tokens (tokens, heads, head dim) over what the items say.

    Returns:
        Output (results, heads, value dim) and lse (results, heads), fp32; a result for each token
        of each reading, in their order.
    """
    return call(items, query)


def _differentiated(*tensors: torch.Tensor) -> bool:
    """Whether gradients are asked for, which the kernel does not give."""
    return any(tensor.requires_grad for tensor in tensors)


@cache
def _agrees(dtype: torch.dtype, dim: int, value_dim: int) -> bool:
    """Ask the kernel small questions and compare with the reference.

    Where it answers otherwise it is left out: a backend may never change what comes out.
    """
    generator = torch.Generator().manual_seed(0)

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator).to(dtype)

    questions = []
    # A row of each kv head, then more than one tile of rows.
    for rows, softcap in ((1, None), (1, 3.0), (50, None), (50, 3.0)):
        query, key, value = draw(1, 6, rows, dim), draw(1, 2, 700, dim), draw(1, 2, 700, value_dim)
        request = Request(query, key, value, dim**-0.5, temperature=0.7, softcap=softcap)
        questions.append((attend(request), reference.attend(request)))
    query, key, value = draw(1, 6, 300, dim), draw(1, 2, 300, dim), draw(1, 2, 300, value_dim)
    request = Request(query, key, value, dim**-0.5, causal=True)
    reading = Reading([(key[0], value[0])], range(300), dim**-0.5, None, 1.0, causal=True)
    output, lse = call(Items([reading]), query[0].transpose(0, 1))
    own = output.transpose(0, 1).unsqueeze(0), lse.transpose(0, 1).unsqueeze(0)
    questions.append((own, reference.attend(request)))
    for (output, lse), (expected, expected_lse) in questions:
        if not (
            torch.allclose(output.float(), expected.float(), atol=_TOLERANCE[dtype])
            and torch.allclose(lse, expected_lse, atol=_LSE_TOLERANCE)
        ):
            logger.warning("The CPU kernel for %s differs from the reference.", dtype)
            return False
    return True
