"""Windows of which each query reads the few that suit it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, get_args

from rag_windows.errors import MethodError
from rag_windows.methods.composed import Composed
from rag_windows.methods.key_search import KeySearch, Similarity
from rag_windows.methods.steps import Fusion, Selection


@dataclass(frozen=True, slots=True)
class Codebook(Composed):
    """The model's own keys choose which passages a query reads; ``reader`` reads those.

    All passages are encoded, refined where ``reader`` refines them (Deep-Thinking,
    https://arxiv.org/abs/2305.13016, is what such a store was thought for), and kept. The query is
    encoded like one more window, so that its keys are rotated as theirs are, and the ``retrieve``
    passages of the most similar keys are read; for the similarity see `KeySearch`. How the chosen
    windows come together:

    ======== ==========================================================================
    fusion   what the query reads
    ======== ==========================================================================
    concat   the windows, side by side, as if no others had been given
    mean     one window: at each position the mean of their keys and of their values
    sum      one window: at each position their sum
    ======== ==========================================================================

    Mean and sum lay the windows over each other from the first position on (with right-aligned
    windows from the last), over those that reach a position; they mix keys that were rotated alike.
    A passage that became several windows is chosen or left as a whole.

    With passages given to ``generate`` all of them are encoded for the request, or found in a
    cache. `WindowedLM.codebook` makes a store that keeps them and reads no more than it chooses.

    Attributes:
        size: passages that such a store holds at most, None for any number; no matter here.
        retrieve: passages that a query reads.
        similarity: "cosine", "dot" or "euclidean".
        fusion: "concat", "mean" or "sum".
        layers: whose keys are compared; None for two, at half of the depth and the last.
        page: tokens whose keys are averaged before they are compared.

    Raises:
        MethodError: numbers outside their domain, or a reader that can't read what was chosen.
    """

    size: int | None = None
    retrieve: int = 8
    similarity: Similarity = "cosine"
    fusion: Fusion = "concat"
    layers: tuple[int, ...] | None = None
    page: int = 4

    name: ClassVar[str] = "codebook"
    formula: ClassVar[str] = "reader's, over the windows of the keys most like the query's"
    paper: ClassVar[str] = "-"

    def __post_init__(self) -> None:
        Composed.__post_init__(self)
        if self.size is not None and (type(self.size) is not int or self.size < 1):
            raise MethodError(
                f"size must be a number of passages above 0, or None for any; got {self.size!r}."
            )
        if type(self.retrieve) is not int or self.retrieve < 1:
            raise MethodError(
                f"retrieve must be a number of passages above 0, got {self.retrieve!r}."
            )
        if self.fusion not in get_args(Fusion):
            raise MethodError(
                f"fusion must be one of {list(get_args(Fusion))}, got {self.fusion!r}."
            )
        if isinstance(self.layers, list):
            object.__setattr__(self, "layers", tuple(self.layers))
        _ = self.search
        if self.reader.recompute is not None or self.reader.alignment == "in order":
            raise MethodError(
                f"codebook can't be combined with {self.reader.name}, whose windows see each other "
                "before the query is known; use ape or pcw, or link the few passages that you have "
                "retrieved."
            )
        if self.fusion != "concat" and self.reader.combination is not None:
            raise MethodError(
                f"fusion={self.fusion!r} makes one window, and {self.reader.name} is of several "
                "that answer each for itself; use fusion='concat'."
            )

    @property
    def search(self) -> KeySearch:
        """How keys are compared."""
        return KeySearch(self.similarity, self.layers, self.page)

    @property
    def selection(self) -> Selection | None:
        """The choice."""
        return Selection(self.retrieve, self.search, self.fusion)
