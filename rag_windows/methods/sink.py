"""Windows that have an attention sink of their own while they are encoded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rag_windows.methods.base import whole
from rag_windows.methods.composed import Composed


@dataclass(frozen=True, slots=True)
class Sink(Composed):
    """Windows with the prefix's first tokens once more in front of them while they are encoded.

    The first tokens of a text attract attention that has nowhere else to go (Xiao et al.,
    "Efficient Streaming Language Models with Attention Sinks", https://arxiv.org/abs/2309.17453).
    A chunk encoded by itself makes its own beginning such a sink, and many chunks then have many
    of them. An independent comparison (https://arxiv.org/abs/2603.20218) combines known
    remedies, a sink among them; "sink+linked:choose=deviation+ape" is that kind of combination.
    Here each window sees the shared prefix already, which is a sink by itself; this method adds one
    directly in front of the window, whose keys and values are then left out. Expect little of it
    behind a prefix of some length.

    The tokens are the prefix's own first ones, since they are what the model puts such attention
    on: the token that begins a text, and what begins a chat template. Nothing that a passage says
    gets there. Windows stand as many positions further; one behind the other (`Linked`), they stand
    where they did, and the sink shares positions with what stands in front.

    Attributes:
        tokens: how many, at least 0; of a shorter prefix all, and without a prefix none.
    """

    tokens: int = 4

    name: ClassVar[str] = "sink"
    formula: ClassVar[str] = "reader's, over windows encoded as P | P_1 ... P_n C_i"
    paper: ClassVar[str] = "arXiv:2309.17453, arXiv:2603.20218"

    def __post_init__(self) -> None:
        Composed.__post_init__(self)
        self.require("tokens", whole(self.tokens, 0), "a number of tokens, 0 or more")

    @property
    def sink(self) -> int:
        """As many as `tokens` says."""
        return self.tokens

    @property
    def encoding(self) -> str:
        """The reader's with the number of tokens."""
        reader = self.reader.encoding
        return f"{reader}, sink={self.tokens}" if self.tokens else reader
