"""The default: the method that answered best on real models."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

from rag_windows.methods.base import Method
from rag_windows.methods.neighbours import Neighbours
from rag_windows.methods.pcw import PCW
from rag_windows.methods.query_likelihood import QueryLikelihood
from rag_windows.methods.sequential import Sequential


@dataclass(frozen=True, slots=True)
class Auto(Neighbours):
    """Reads the two passages that suit the question best; chunks know their document.

    What `docs/which_method.md` has figures for. Passages are encoded as `Neighbours` does it: each
    by itself, and a document's chunk in sight of the one in front of it. Of them, `QueryLikelihood`
    chooses what the question reads, by how likely they make it, by the attention that it draws to
    them, and by the titles that the first one names: in one prompt, or side by side where one of
    them was encoded in sight of neighbours, which one prompt would not have, or where one prompt
    may not hold them. Two passages or fewer are one prompt.

    A note of each answer says what it did.
    """

    chunks: int | Literal["all"] = 1
    reader: Method = field(
        default=QueryLikelihood(2, attention=0.7, bridge=1.5, reader=Sequential()), kw_only=True
    )

    name: ClassVar[str] = "auto"
    formula: ClassVar[str] = (
        "neighbours:chunks=1+query-likelihood:retrieve=2,attention=0.7,bridge=1.5+sequential"
    )
    paper: ClassVar[str] = "-"

    def __post_init__(self) -> None:
        Neighbours.__post_init__(self)
        if self.reader.neighbours:
            self.refuse("it looks for neighbours itself. Use ape or pcw as the reader.")

    def apart(self) -> Auto:
        """The same, which reads side by side what one prompt does not hold."""
        chosen = self.reader
        if isinstance(chosen, QueryLikelihood) and not chosen.reader.windowed:
            return replace(self, reader=replace(chosen, reader=PCW()))
        return self
