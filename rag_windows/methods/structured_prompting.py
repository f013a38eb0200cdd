"""Structured Prompting."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rag_windows.methods.base import Alignment, Method


@dataclass(frozen=True, slots=True)
class StructuredPrompting(Method):
    """Windows that end at one position; the query's own tokens count once for each window.

    With M windows, the logits of the query's own tokens (generated ones included) count M times, so
    that the windows do not outweigh them. The paper has no prefix; here it is not weighted.
    Source: Hao et al., "Structured Prompting: Scaling In-Context Learning to 1,000 Examples",
    https://arxiv.org/abs/2212.06713, section 3 (rescaled attention, right-aligned positions).

    A window's position depends on the longest one of the request, so a cache finds it again only
    beside windows of the same longest length, and it can't be warmed ahead.
    """

    name: ClassVar[str] = "structured-prompting"
    formula: ClassVar[str] = "l = l_C; query: l_Q + log M; windows end together"
    paper: ClassVar[str] = "arXiv:2212.06713"

    @property
    def alignment(self) -> Alignment:
        """Every window ends where the longest does."""
        return "right"

    def query_weight(self, windows: int) -> float:
        """M, the number of windows."""
        return float(windows)
