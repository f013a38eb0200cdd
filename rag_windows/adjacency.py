"""Tensors that stand side by side in memory already."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch


def follows(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether the tokens of the other (heads, tokens, dim) tensor stand right behind the one's."""
    return (
        other.untyped_storage().data_ptr() == one.untyped_storage().data_ptr()
        and other.storage_offset() == one.storage_offset() + one.shape[1] * one.stride(1)
        and other.stride() == one.stride()
        and other.shape[::2] == one.shape[::2]
    )


def side_by_side(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """(heads, tokens, dim) tensors joined along the tokens; a view where they stand on a shelf."""
    if not all(follows(one, other) for one, other in pairwise(tensors)):
        return torch.cat(list(tensors), dim=1)
    first = tensors[0]
    tokens = sum(tensor.shape[1] for tensor in tensors)
    return first.as_strided((first.shape[0], tokens, first.shape[2]), first.stride())
