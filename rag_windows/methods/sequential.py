"""The ordinary prompt: the baseline of every method."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rag_windows.methods.base import Method


@dataclass(frozen=True, slots=True)
class Sequential(Method):
    """One prompt in which every passage sees those before it.

    Same engine and same prompt parts as the parallel methods: the passages form one long window
    behind the prefix, which is ordinary full attention.
    """

    name: ClassVar[str] = "sequential"
    formula: ClassVar[str] = "one window: P | C_1 C_2 ... C_n | Q"
    paper: ClassVar[str] = "-"

    @property
    def windowed(self) -> bool:
        """False."""
        return False
