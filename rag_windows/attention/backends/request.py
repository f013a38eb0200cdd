"""What every attention backend is asked."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from types import MappingProxyType

import torch

Segment = tuple[torch.Tensor, torch.Tensor]
"""What a backend answers: output (batch, heads, rows, value dim) and lse (batch, heads, rows)."""


@dataclass(frozen=True, slots=True)
class Request:
    """Attention of some rows over one segment.

    Attributes:
        query: (batch, heads, rows, head dim).
        key: (batch, kv heads, keys, head dim); heads is a multiple of kv heads.
        value: (batch, kv heads, keys, value dim).
        scale: multiplies the logits.
        temperature: divides them, after the soft cap.
        softcap: ``tanh(logits / softcap) * softcap``, or None.
        causal: row i sees keys 0..i; only where rows == keys, and without ``mask``.
        mask: bool, (rows, keys) or (batch, 1, rows, keys), True where a row sees a key; or None.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scale: float
    temperature: float = 1.0
    softcap: float | None = None
    causal: bool = False
    mask: torch.Tensor | None = None

    def visible(self, start: int, stop: int) -> torch.Tensor | None:
        """What rows start..stop see; None if they see every key.

        Returns:
            Bool, (stop - start, keys) or (batch, 1, 1, stop - start, keys).
        """
        if self.mask is not None:
            part = self.mask[..., start:stop, :]
            return part if part.dim() == 2 else part.unsqueeze(2)
        if not self.causal:
            return None
        keys = torch.arange(self.key.shape[2], device=self.key.device)
        return keys <= torch.arange(start, stop, device=self.key.device).unsqueeze(-1)


KERNEL = "native"
"""The C kernel, which is asked for several segments at once, see `rag_windows.attention.native`."""

ORDER: Mapping[str, tuple[str, ...]] = MappingProxyType({"cpu": (KERNEL, "cpu"), "cuda": ("cuda",)})
"""For each type of device, the backends that are asked before the reference, fastest first."""

FORCED: ContextVar[str | None] = ContextVar("rag_windows_backend", default=None)
"""The one that is asked in this thread or task instead; see ``forced``."""


def names(device: str) -> tuple[str, ...]:
    """Backends that are asked on a type of device, before the reference."""
    name = FORCED.get()
    return ORDER.get(device, ()) if name is None else (name,)
