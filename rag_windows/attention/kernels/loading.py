"""The compiled kernels, where Triton is installed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from subprocess import SubprocessError
from typing import Any


@dataclass(frozen=True, slots=True)
class Kernels:
    """Kernels and what they may raise.

    Attributes:
        partials: see `rag_windows.attention.kernels.split`.
        combine: see `rag_windows.attention.kernels.combine`.
        interpreted: whether Triton's interpreter runs them, on tensors of the CPU.
        errors: what a failed compilation or launch raises: besides Triton's own errors those of
            LLVM, of the host's compiler and of the folder that keeps compiled kernels.
    """

    partials: Any
    combine: Any
    interpreted: bool
    errors: tuple[type[Exception], ...]


@cache
def kernels() -> Kernels | None:
    """The kernels, or None without Triton."""
    try:
        import triton
    except ImportError:
        return None
    from rag_windows.attention.kernels.combine import combine
    from rag_windows.attention.kernels.split import partials

    return Kernels(
        partials,
        combine,
        interpreted=not isinstance(partials, triton.JITFunction),
        errors=(triton.TritonError, RuntimeError, OSError, SubprocessError),
    )
