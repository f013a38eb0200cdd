"""Whether a method's rescaling is a slope and a shift."""

from __future__ import annotations

from rag_windows.rescaling.base import Affine, Method


def affine(method: Method) -> Affine | None:
    """Slope and shift of a method's `context_lse`, or None where only the function itself will do.

    A class that inherits `context_affine` from a method whose `context_lse` it overrides would
    answer with the wrong numbers; so both must come from the same class.
    """
    kind = type(method)
    if _home(kind, "context_affine") is not _home(kind, "context_lse"):
        return None
    return method.context_affine


def _home(kind: type, name: str) -> type:
    return next(one for one in kind.__mro__ if name in one.__dict__)
