"""Which backends are asked, in which order."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from types import MappingProxyType

ORDER: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"cpu": ("native", "cpu"), "cuda": ("cuda",)}
)
"""For each type of device, the backends that are asked before the reference, fastest first."""

FORCED: ContextVar[str | None] = ContextVar("rag_windows_backend", default=None)
"""The one that is asked in this thread or task instead; see ``forced``."""


def names(device: str) -> tuple[str, ...]:
    """Backends that are asked on a type of device, before the reference."""
    name = FORCED.get()
    return ORDER.get(device, ()) if name is None else (name,)
