"""Attention that returns its log-sum-exp: one small file a backend, one contract."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Protocol

import torch

from rag_windows.attention.backends import cpu, cuda, native, reference, triton_decode
from rag_windows.attention.backends.choice import FORCED, names
from rag_windows.attention.backends.request import Request, Segment

__all__ = ["BACKENDS", "Request", "Segment", "attend", "attend_merged", "forced", "merges"]


class Backend(Protocol):
    """What the modules of this package that are a backend offer."""

    def serves(self, request: Request, /) -> bool:
        """Whether `attend` answers this request, and rightly, on its device."""

    def attend(self, request: Request, /) -> tuple[torch.Tensor, torch.Tensor]:
        """Same contract as `reference.attend`."""


BACKENDS: Mapping[str, Backend] = MappingProxyType(
    {"reference": reference, "native": native, "cpu": cpu, "cuda": cuda, "triton": triton_decode}
)


@contextmanager
def forced(name: str) -> Iterator[None]:
    """Use one backend, and the reference for what it does not serve, in this thread or task.

    Args:
        name: of `BACKENDS`.

    Raises:
        KeyError: there is none of that name.
    """
    if name not in BACKENDS:
        raise KeyError(name)
    token = FORCED.set(name)
    try:
        yield
    finally:
        FORCED.reset(token)


def attend(request: Request) -> tuple[torch.Tensor, torch.Tensor]:
    """Answer with the fastest backend that serves the request; see `reference.attend`."""
    for name in names(request.query.device.type):
        if BACKENDS[name].serves(request):
            return BACKENDS[name].attend(request)
    return reference.attend(request)


def merges(request: Request) -> bool:
    """Whether a backend may merge this request's segments in one go."""
    return "triton" in names(request.query.device.type)


def attend_merged(
    request: Request,
    batch: int,
    rows: int,
    segments: Sequence[Segment],
    affine: tuple[float, float] | None,
    sink: torch.Tensor | None,
) -> torch.Tensor | None:
    """Attention over the context merged with other segments in one go; see `merges`.

    Args:
        request: over the context, the batch's rows and the heads of a kv head folded.
        batch: batch rows.
        rows: of each and each head.
        segments: the others.
        affine: what becomes of the context's lse, or None where that is no slope and shift.
        sink: (heads,) logits of a segment without output, or None.

    Returns:
        (batch, heads, rows, value dim) in the query's dtype; None where it takes steps.
    """
    if affine is None or not merges(request):
        return None
    if not triton_decode.merges(request, segments):
        return None
    return triton_decode.attend_merged(request, batch, rows, segments, affine, sink)
