"""What kernels for several segments are asked, and the answers by the specification."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rag_windows.attention import items

Pair = tuple[Tensor, Tensor]
"""Keys and values."""


def item(
    parts: Sequence[Pair],
    tokens: Sequence[int] = (0,),
    softcap: float | None = None,
    temperature: float = 1.0,
    *,
    scale: float = 0.1,
    **further: Any,
) -> items.Item:
    """One item, with what most of them have."""
    places = torch.tensor([*tokens], dtype=torch.int64)
    return items.Item(parts, places, scale, softcap, temperature, **further)


def exact(
    asked: Sequence[items.Item], query: Tensor, dtype: torch.dtype = torch.float64
) -> items.Answered:
    """The reference's answers to all of them, with those of all of their parts."""
    found = []
    for one in asked:
        parts = [(key.to(dtype), value.to(dtype)) for key, value in one.parts]
        found.append(items.by_reference(replace(one, parts=parts), query.to(dtype)))
    output, lse = (torch.cat(each) for each in zip(*(one[:2] for one in found), strict=True))
    return items.Answered(output, lse, [one.parts[0] for one in found if one.parts])
