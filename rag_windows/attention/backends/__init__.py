"""Attention that returns its log-sum-exp: one small file a backend, one contract."""

from __future__ import annotations

import torch

from rag_windows.attention.backends import cpu, cuda, reference
from rag_windows.attention.backends.request import Request

__all__ = ["Request", "attend"]


def attend(request: Request) -> tuple[torch.Tensor, torch.Tensor]:
    """Answer with the fastest backend that serves the request; see `reference.attend`."""
    device = request.query.device.type
    if device == "cpu" and cpu.serves(request):
        return cpu.attend(request)
    if device == "cuda" and cuda.serves(request):
        return cuda.attend(request)
    return reference.attend(request)
