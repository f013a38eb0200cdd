"""Windows that are encoded in sight of the chunks in front of them in their document."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import ClassVar, Literal

from rag_windows.methods.base import whole
from rag_windows.methods.composed import Composed


@dataclass(frozen=True, slots=True)
class Neighbours(Composed):
    """Windows encoded in sight of the chunks in front of them in their document.

    Late chunking for keys and values, and the part of FusionRAG (https://arxiv.org/abs/2601.12904)
    that is done before there is a question: the chunks in front of a passage (`Passage.before`,
    which `with_neighbours` fills in) run through the model with it, behind the prefix, and their
    keys and values are then left out. So "she" in a later chunk has met the name in an earlier one.
    A question reads no more tokens than without, and warmed windows cost nothing when it is asked.
    Encoding a chunk costs as much as encoding it and its neighbours, but chunks that begin one
    document together are encoded in one pass.

    A chunk with n tokens in front of it stands at position p + n behind a prefix of p tokens: there
    it would stand in its document, so that all chunks of one document, each encoded in sight of all
    chunks in front of it, are read as the whole document would be. The query stands behind the
    furthest end. A window is cached under its neighbours' tokens, too; one without any is that of
    other methods. A passage without ``before`` is encoded as it is, and a note says so if it is not
    the first of its document.

    Attributes:
        chunks: how many chunks at most, nearest first; "all" takes all that `Passage.before` has.
            The parts of a passage that is split by ``max_window_tokens`` are chunks as well.
    """

    chunks: int | Literal["all"] = "all"

    name: ClassVar[str] = "neighbours"
    formula: ClassVar[str] = "reader's, over windows encoded as P | C_{i-k} ... C_{i-1} C_i"
    paper: ClassVar[str] = "arXiv:2601.12904"

    def __post_init__(self) -> None:
        Composed.__post_init__(self)
        good = self.chunks == "all" or whole(self.chunks, 0)
        self.require("chunks", good, "a number of chunks, 0 or more, or 'all'")
        if self.reader.alignment == "in order":
            self.refuse(
                "its windows stand one behind the other, which leaves no room for neighbours. Use "
                "ape or pcw as the reader, or 'sink' in place of 'neighbours'."
            )

    @property
    def neighbours(self) -> int:
        """As many as `chunks` says."""
        return sys.maxsize if self.chunks == "all" else self.chunks
