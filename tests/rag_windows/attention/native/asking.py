"""Questions for the compiled kernel, and their answers by an explicit float64 softmax."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Sequence
from typing import Literal

import pytest
import torch
from torch import Tensor

from rag_windows.attention.native import building
from rag_windows.attention.native.kernel import Item

NEEDS_COMPILER = pytest.mark.skipif(
    os.environ.get(building.VARIABLE) == "0"
    or building._compiler() is None
    or building._openmp() is None,
    reason="needs a C compiler, and PyTorch with OpenMP",
)

Kind = tuple[torch.dtype, int, int]
"""Dtype, head dim and value dim: each is compiled once a process."""

SMALL: tuple[Kind, ...] = (
    (torch.float32, 16, 16),
    (torch.bfloat16, 16, 16),
    (torch.float16, 16, 16),
)
# Sizes of several vectors, with and without a remainder, and beyond 128, where tiles are smaller.
KINDS: tuple[Kind, ...] = (
    *SMALL,
    (torch.float32, 48, 80),
    (torch.bfloat16, 144, 80),
    (torch.float16, 32, 64),
)

# Rounding to the dtype; many rows in bf16 have weights in bf16, too.
OUTPUT_TOLERANCE = {torch.float32: 5e-6, torch.float16: 1e-3, torch.bfloat16: 1.2e-2}
# Float32 whatever the inputs are: rounded to bf16 it would be off by 1e-2 and more.
LSE_TOLERANCE = 1e-5

Layout = Literal["dense", "tokens first", "within others"]


def draw(dtype: torch.dtype, *size: int, seed: int = 0) -> Tensor:
    """Normal numbers, the same whatever was drawn before."""
    generator = torch.Generator().manual_seed(seed + sum(size))
    return torch.randn(*size, generator=generator).to(dtype)


def laid(tensor: Tensor, layout: Layout) -> Tensor:
    """The same (heads, tokens, dim) numbers, in memory in one of the ways that windows are.

    What stands around them is NaN: nobody may read it.
    """
    heads, tokens, dim = tensor.shape
    if layout == "dense":
        return tensor.contiguous()
    if layout == "tokens first":
        return tensor.transpose(0, 1).contiguous().transpose(0, 1)
    whole = tensor.new_full((heads + 1, tokens + 5, dim + 3), torch.nan)
    part = whole[1:, 2:-3, 1:-2]
    part.copy_(tensor)
    return part


def before_a_wall(tensor: Tensor) -> Tensor:
    """The same numbers, right before a page of memory that stops who reads it."""
    size = -(-tensor.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, size + mmap.PAGESIZE)
    wall = ctypes.addressof(ctypes.c_char.from_buffer(memory)) + size
    no_access = 0
    if ctypes.CDLL(None).mprotect(ctypes.c_void_p(wall), mmap.PAGESIZE, no_access):
        raise OSError("no page could be closed")
    made = torch.frombuffer(
        memory, dtype=tensor.dtype, count=tensor.numel(), offset=size - tensor.nbytes
    )
    return made.view(tensor.shape).copy_(tensor)


def segment(kind: Kind, heads: int, keys: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Keys and values."""
    dtype, dim, value_dim = kind
    return draw(dtype, heads, keys, dim, seed=seed), draw(
        dtype, heads, keys, value_dim, seed=seed + 1
    )


def reading(
    segments: Sequence[tuple[Tensor, Tensor]],
    tokens: Sequence[int] = (0,),
    scale: float = 0.3,
    softcap: float | None = None,
    temperature: float = 1.0,
    causal: bool = False,
) -> Item:
    """A reading, with what most of them have."""
    return Item(segments, tokens, scale, softcap, temperature, causal)


def exact(readings: Sequence[Item], query: Tensor) -> tuple[Tensor, Tensor]:
    """Output (results, heads, value dim) and lse (results, heads) in float64."""
    outputs, lses = [], []
    for one in readings:
        key = torch.cat([key for key, _ in one.segments], dim=1).double()
        value = torch.cat([value for _, value in one.segments], dim=1).double()
        rows = query[list(one.tokens)].double().unflatten(1, (key.shape[0], -1))
        logits = torch.einsum("thgd,hnd->thgn", rows, key) * one.scale
        if one.softcap is not None:
            logits = one.softcap * torch.tanh(logits / one.softcap)
        logits = logits / one.temperature
        if one.causal:
            seen = torch.ones(len(one.tokens), key.shape[1], dtype=torch.bool).tril()
            logits = logits.masked_fill(~seen[:, None, None], -torch.inf)
        outputs.append((logits.softmax(-1) @ value.unsqueeze(0)).flatten(1, 2))
        lses.append(logits.logsumexp(-1).flatten(1, 2))
    return torch.cat(outputs), torch.cat(lses)
