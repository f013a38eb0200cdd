"""What backends are asked, and the answers by the specification."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rag_windows.attention.backends import AttentionAnswer, AttentionRequest, parts_of, reference

Pair = tuple[Tensor, Tensor]
"""Keys and values."""


def request(
    parts: Sequence[Pair],
    tokens: Sequence[int] = (0,),
    softcap: float | None = None,
    temperature: float = 1.0,
    *,
    scale: float = 0.1,
    **further: Any,
) -> AttentionRequest:
    """One request, with what most of them have."""
    places = torch.tensor([*tokens], dtype=torch.int64)
    return AttentionRequest(parts, scale, softcap, temperature, places, **further)


def exact(
    asked: Sequence[AttentionRequest], query: Tensor, dtype: torch.dtype = torch.float64
) -> AttentionAnswer:
    """The reference's answers to all of them, with those of all of their parts."""
    wide = []
    for one in asked:
        parts = [(key.to(dtype), value.to(dtype)) for key, value in parts_of(one, dtype)]
        mask = one.mask
        if one.causal:
            # The kernel in C is also made for texts that are cut, which nobody asks for.
            rows = len(one.places(query)) // one.groups
            seen = torch.ones(rows, one.keys, dtype=torch.bool, device=query.device).tril()
            mask = seen.expand(one.groups, 1, -1, -1)
        wide.append(replace(one, parts=parts, peaks=None, causal=False, mask=mask))
    found = reference(wide, query.to(dtype), per_part=True)
    lses = found.lse.split([len(one.places(query)) for one in asked])
    each = zip(found.parts or (), lses, strict=True)
    return found._replace(parts=[lse.unsqueeze(0) if own is None else own for own, lse in each])
