"""Windows stored in 8 bits per number, with one scale per channel.

A channel is one dimension of one key/value head in one layer; its scale covers the window's tokens.
Keys have channels much larger than others, whatever the token, so a scale per channel loses far
less than one per token would (KIVI, https://arxiv.org/abs/2402.02750).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rag_windows.cache.codec import Stored, require_finite, window_of
from rag_windows.errors import CacheError
from rag_windows.kv import Window

_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "float64": torch.float64,
}


@dataclass(frozen=True, slots=True)
class Quantized:
    """x is kept as q = x / peak * `largest` in `dtype`, where peak = max |x| over the tokens.

    Layers of one shape and dtype are stored as one tensor (n, heads, tokens, width), beside their
    peaks (n, heads, 1, width) in float32, so that decoding a window takes a few operations however
    many layers there are. A channel's peak comes back as it was, so what was decoded once can be
    encoded and decoded again, on its way between tiers, without changing any more.

    Attributes:
        name: what users and files call it.
        dtype: 8 bits.
        largest: the largest number of `dtype` that is used.
        exact: never.
    """

    name: str
    dtype: torch.dtype
    largest: float
    exact: bool = False

    def encode(self, window: Window) -> Stored:
        """See `Codec`."""
        require_finite(window)
        tensors = (*window.keys, *window.values)
        groups: dict[tuple[torch.dtype, torch.Size, torch.device], list[int]] = {}
        for index, tensor in enumerate(tensors):
            if _name(tensor.dtype) not in _DTYPES:
                raise CacheError(f"keys and values in {tensor.dtype} can't be kept as {self.name}.")
            groups.setdefault((tensor.dtype, tensor.shape, tensor.device), []).append(index)
        stored: list[torch.Tensor] = []
        for indices in groups.values():
            stored += self._quantize(torch.stack([tensors[index] for index in indices]))
        described = {
            "layers": len(window.keys),
            "groups": list(groups.values()),
            "dtypes": [_name(dtype) for dtype, _, _ in groups],
        }
        return Stored(tuple(stored), described)

    def decode(self, stored: Stored, ids: tuple[int, ...], start: int) -> Window:
        """See `Codec`."""
        groups, dtypes = _described(stored.description)
        if len(stored.tensors) != 2 * len(groups):
            raise CacheError(f"stored are {len(stored.tensors)} tensors for {len(groups)} groups.")
        count = sum(len(indices) for indices in groups)
        if sorted(index for indices in groups for index in indices) != list(range(count)):
            raise CacheError("the stored groups name a layer twice or not at all.")
        tensors: dict[int, torch.Tensor] = {}
        for number, (indices, dtype) in enumerate(zip(groups, dtypes, strict=True)):
            small, peak = stored.tensors[2 * number : 2 * number + 2]
            expected = (len(indices), *small.shape[1:2], 1, *small.shape[3:4])
            if small.ndim != 4 or small.dtype != self.dtype or small.shape[0] != len(indices):
                raise CacheError(f"stored is a {small.dtype} tensor of shape {tuple(small.shape)}.")
            if tuple(peak.shape) != expected or peak.dtype != torch.float32:
                raise CacheError(f"peaks of shape {expected} belong to it, not {peak.shape}.")
            whole = small.to(torch.float32).div_(self.largest).mul_(peak).to(dtype)
            tensors.update(zip(indices, whole.unbind(), strict=True))
        ordered = [tensors[index] for index in range(count)]
        return window_of(ordered, stored.description, ids, start)

    def _quantize(self, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        wide = tensor.to(torch.float32)
        # A channel of zeros, or of numbers too small to divide by, becomes zeros.
        peak = wide.abs().amax(dim=2, keepdim=True).clamp_(min=torch.finfo(torch.float32).tiny)
        shrunk = (wide / peak).mul_(self.largest)
        return (shrunk if self.dtype.is_floating_point else shrunk.round_()).to(self.dtype), peak


FP8 = Quantized("fp8", torch.float8_e4m3fn, 448.0)
"""4 bits of exponent, 3 of mantissa: steps in proportion to the number."""

INT8 = Quantized("int8", torch.int8, 127.0)
"""Equal steps, symmetric about zero."""


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _described(
    description: Mapping[str, Any],
) -> tuple[Sequence[Sequence[int]], list[torch.dtype]]:
    groups, dtypes = description.get("groups"), description.get("dtypes")
    if not isinstance(groups, list) or not isinstance(dtypes, list) or len(groups) != len(dtypes):
        raise CacheError("the stored tensors have no description of groups and dtypes.")
    for indices in groups:
        if not isinstance(indices, list) or not all(type(index) is int for index in indices):
            raise CacheError("the stored groups are no lists of numbers.")
    if not all(isinstance(name, str) and name in _DTYPES for name in dtypes):
        raise CacheError(f"the stored dtypes {dtypes} are not among {', '.join(_DTYPES)}.")
    return groups, [_DTYPES[name] for name in dtypes]
