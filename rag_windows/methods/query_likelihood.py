"""Windows of which each query reads those behind which it is likeliest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rag_windows.methods.base import finite, whole
from rag_windows.methods.composed import Composed


@dataclass(frozen=True, slots=True)
class QueryLikelihood(Composed):
    """The query reads only those passages behind which the model finds it likeliest.

    Query-likelihood ranking by the reader itself, over cached windows. One pass runs the query's
    tokens in a row a window, as `ParallelEnsemble` does (prefix P, window C_i, query Q), and gives

        l_i = log p(Q | P, C_i) + gamma log r_i

    summed over the tokens of the question but its first, of which no row knows the chance. Sources:
    Ponte and Croft (SIGIR 1998); Sachan et al., "Improving Passage Retrieval with Zero-Shot
    Question Generation", https://arxiv.org/abs/2204.07496 (the same number, by a separate model);
    Merth et al., "Superposition Prompting", https://arxiv.org/abs/2404.06910 (paths are pruned by
    it). ``reader`` then reads the ``retrieve`` passages of the largest ``l_i``, as if no others had
    been given. A passage that was split into several windows counts by its best one and is read as
    a whole.

    With `Sequential` as the reader the chosen passages are read in one prompt, the likeliest
    first: it stands there as its window does, so that only the others are encoded once more.

    Attributes:
        retrieve: number of passages that a query reads.
        gamma: weight of retrieval scores, finite and at least 0; see
            `rag_windows.methods.relevance.log_relevance`. If a passage has none, none of them
            counts.
    """

    retrieve: int = 1
    gamma: float = 0.0

    name: ClassVar[str] = "query-likelihood"
    formula: ClassVar[str] = "reader's, over the windows with the largest log p(Q | P, C_i)"
    paper: ClassVar[str] = "arXiv:2204.07496"

    reads_sequential: ClassVar[bool] = True

    def __post_init__(self) -> None:
        Composed.__post_init__(self)
        gamma = self.gamma
        self.require("retrieve", whole(self.retrieve, 1), "a number of passages above 0")
        self.require("gamma", finite(gamma) and gamma >= 0, "a finite number of at least 0")
        if self.reader.recompute is not None or self.reader.alignment != "left":
            self.refuse(
                "its windows don't all start behind the prefix; use pcw, ape or sequential."
            )
        if self.reader.selection is not None:
            self.refuse("both choose what a query reads.")

    @property
    def windowed(self) -> bool:
        """True: passages are encoded side by side, whatever reads the chosen ones."""
        return True

    @property
    def selection(self) -> QueryLikelihood | None:
        """Itself."""
        return self
