"""Windows of which each query reads those behind which it is likeliest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from rag_windows.methods.base import finite, whole
from rag_windows.methods.composed import Composed

Score = Literal["gain", "likelihood"]


@dataclass(frozen=True, slots=True)
class QueryLikelihood(Composed):
    """The query reads only those passages that make it likeliest to the model.

    Query-likelihood ranking by the reader itself, over cached windows. One pass runs the query's
    tokens in a row a window and one without any, as `PCED` does (prefix P, window C_i, query Q),
    and gives

        l_i = sum_t max(0, log p(q_t | P, C_i, q_<t) - log p(q_t | P, q_<t))
              - confidence H_i + gamma log r_i

    over the tokens of the question but its first, of which no row knows the chance. What a passage
    makes less likely does not count: words that all questions share are least likely behind the
    passage that tells most of something else ("likelihood" counts them, too, which is the published
    number, ``log p(Q | P, C_i)``). ``H_i`` is the entropy of the answer's first token behind C_i:
    a row with the answer is surer of it. Sources: Ponte and Croft (SIGIR 1998); Sachan et al.,
    "Improving Passage Retrieval with Zero-Shot Question Generation",
    https://arxiv.org/abs/2204.07496 (the likelihood, by a separate model); Merth et al.,
    "Superposition Prompting", https://arxiv.org/abs/2404.06910 (paths are pruned by it). ``reader``
    then reads the ``retrieve`` passages of the largest ``l_i``, as if no others had been given. A
    passage that was split into several windows counts by its best one and is read as a whole.

    With ``attention`` passages are ranked by ``z(l) + attention z(a)``, each number less its mean
    over the passages and divided by its standard deviation. ``a_i`` is the attention on passage i
    of the query's last two tokens, summed over the heads of the middle third of the layers while
    the query reads all windows side by side, less that of a query from which the question is left
    out: most of what a passage gets, it gets for its length, its place and its first words. Source:
    in-context re-ranking (Chen, Gutierrez and Su, https://arxiv.org/abs/2410.02642), which sums all
    layers and tokens of the question and leaves out the question by asking "N/A". It costs two
    passes of one row. Models that read in rows (docs/rows.md) have no such attention and rank by
    ``l`` alone.

    With ``bridge`` the passages after the first are those of the largest score plus ``bridge``
    standard deviations of all scores where a passage that was chosen before names the other one by
    its title and the user does not: the second fact of a question often stands under a name that
    only the first one tells. Source: the bridge entities of HotpotQA (Yang et al.,
    https://arxiv.org/abs/1809.09600).

    With `Sequential` as the reader the chosen passages are read in one prompt, the likeliest
    first: it stands there as its window does, so that only the others are encoded once more.

    Attributes:
        retrieve: number of passages that a query reads.
        score: "gain" as above, or "likelihood".
        confidence: weight of the entropy of the answer's first token, finite and at least 0.
        gamma: weight of retrieval scores, finite and at least 0; see
            `rag_windows.methods.relevance.log_relevance`. If a passage has none, none of them
            counts.
        attention: weight of the attention on each passage, finite and at least 0.
        bridge: standard deviations for passages that a chosen one names, finite and at least 0.
    """

    retrieve: int = 1
    score: Score = "gain"
    confidence: float = 1.0
    gamma: float = 0.0
    attention: float = 0.0
    bridge: float = 0.0

    name: ClassVar[str] = "query-likelihood"
    formula: ClassVar[str] = "reader's, over the windows that most raise log p(Q | P, C_i)"
    paper: ClassVar[str] = "arXiv:2204.07496, arXiv:2410.02642"

    reads_sequential: ClassVar[bool] = True

    def __post_init__(self) -> None:
        Composed.__post_init__(self)
        weights = {
            "confidence": self.confidence,
            "gamma": self.gamma,
            "attention": self.attention,
            "bridge": self.bridge,
        }
        self.require("retrieve", whole(self.retrieve, 1), "a number of passages above 0")
        self.require_one("score", Score)
        for name, weight in weights.items():
            self.require(name, finite(weight) and weight >= 0, "a finite number of at least 0")
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
