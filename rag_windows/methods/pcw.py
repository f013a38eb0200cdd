"""Parallel Context Windows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rag_windows.methods.base import Method


@dataclass(frozen=True, slots=True)
class PCW(Method):
    """Parallel windows with ordinary attention over all of them, nothing rescaled.

    ``l = l_C``. Source: Ratner et al., "Parallel Context Windows for Large Language Models",
    https://arxiv.org/abs/2212.10947, section 2.
    """

    name: ClassVar[str] = "pcw"
    formula: ClassVar[str] = "l = l_C"
    paper: ClassVar[str] = "arXiv:2212.10947"
