"""Windows that end together, each at a position of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rag_windows.methods.base import Alignment, whole
from rag_windows.methods.composed import Composed


@dataclass(frozen=True, slots=True)
class Aligned(Composed):
    """Windows that end together, directly in front of the question.

    Where windows begin together, the longest one alone stands next to the question, and draws
    attention by that. Structured Prompting (https://arxiv.org/abs/2212.06713, section 3) lets all
    of them end where the longest does, so that a cached window fits only beside windows of the same
    longest length. Here a window ends at the next multiple of some tokens behind the prefix: its
    position is its own, it can be warmed and is found again beside any others, and windows of up to
    so many tokens end together. Between the prefix and a window is a gap of positions without
    tokens.

    Attributes:
        tokens: of which windows end at a multiple, at least 1. Longer windows end at a later one.
    """

    tokens: int = 512

    name: ClassVar[str] = "aligned"
    formula: ClassVar[str] = "reader's, over windows that end together"
    paper: ClassVar[str] = "arXiv:2212.06713"

    def __post_init__(self) -> None:
        Composed.__post_init__(self)
        self.require("tokens", whole(self.tokens, 1), "a number of tokens above 0")
        if self.reader.combination is not None:
            self.refuse("each of its windows answers alone; use pcw or ape as the reader.")
        if self.reader.alignment == "in order":
            self.refuse("its windows stand one behind the other; use pcw or ape as the reader.")

    @property
    def alignment(self) -> Alignment:
        """Ends at multiples of `tokens`."""
        return self.tokens
