"""Attention that returns its log-sum-exp: one small file a backend, one contract."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Protocol

import torch

from rag_windows.attention.backends import cpu, cuda, reference
from rag_windows.attention.backends.request import FORCED, KERNEL, Request, Segment, names

__all__ = ["BACKENDS", "Request", "Segment", "attend", "forced"]


class Backend(Protocol):
    """What the modules of this package that are a backend offer."""

    def serves(self, request: Request, /) -> bool:
        """Whether `attend` answers this request, and rightly, on its device."""

    def attend(self, request: Request, /) -> tuple[torch.Tensor, torch.Tensor]:
        """Same contract as `reference.attend`."""


BACKENDS: Mapping[str, Backend] = MappingProxyType(
    {"reference": reference, "cpu": cpu, "cuda": cuda}
)


@contextmanager
def forced(name: str) -> Iterator[None]:
    """Use one backend, and the reference for what it does not serve, in this thread or task.

    Args:
        name: of `BACKENDS`, or "native", the C kernel that serves whole segments.

    Raises:
        KeyError: there is none of that name.
    """
    if name not in (*BACKENDS, KERNEL):
        raise KeyError(name)
    token = FORCED.set(name)
    try:
        yield
    finally:
        FORCED.reset(token)


def attend(request: Request) -> tuple[torch.Tensor, torch.Tensor]:
    """Answer with the fastest backend that serves the request; see `reference.attend`."""
    for name in names(request.query.device.type):
        if name in BACKENDS and BACKENDS[name].serves(request):
            return BACKENDS[name].attend(request)
    return reference.attend(request)
