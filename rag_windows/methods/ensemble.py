"""Parallel Ensemble, and naive Bayes context extension as its entropy-weighted form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, get_args

from rag_windows.errors import MethodError
from rag_windows.methods.base import Method, finite
from rag_windows.methods.pooling import EntropyPooling, Pooling, Weights

NBCE_BETA = 0.25


@dataclass(frozen=True, slots=True)
class ParallelEnsemble(Method):
    """Each window answers for itself; their next-token distributions make one token for all.

    Sources: Yang et al., "Revisiting Parallel Context Windows", https://arxiv.org/abs/2305.15262
    (a weighted sum of what the windows answer); Su et al., "Naive Bayes-based Context Extension
    for Large Language Models", https://arxiv.org/abs/2403.17552 (NBCE). Row i reads the prefix P,
    window C_i and the query Q, whose first token stands in every row behind the longest window;
    inside a row nothing is rescaled. With ``p_i = p(token | P, C_i, Q)`` and ``p_0 = p(token | P,
    Q)``, asked at the same positions:

        pooled   = sum_i w_i log p_i, normalised
        combined = (1 + beta) pooled - beta log p_0, normalised

    ============== =====================================================================
    weights        w_i
    ============== =====================================================================
    "uniform"      1 / number of windows
    "retrieval"    softmax over passages of score / score_temperature; a passage that was
                   cut into several windows shares its weight among them
    "entropy"      for each token anew, from the entropy H_i of p_i: 1 / H_i, normalised
                   (pooling "inverse"), or 1 for the surest window (pooling "minimum",
                   NBCE's own choice)
    ============== =====================================================================

    One token is chosen for all rows: greedy decoding, sampling, beams and scores read ``combined``
    as they would read the model's logits. The correction by beta concerns only tokens in the
    ``nucleus`` of both pooled and p_0 (the fewest tokens that hold so much of the probability), as
    in NBCE's released code: where p_0 is next to nothing, the difference of logarithms would lift
    tokens that no window proposes. Other tokens keep ``pooled`` (that code rules out those outside
    pooled's, which would make scores of unlikely answers infinite); ``nucleus=1`` is the formula
    for every token. NBCE as published is pooling "minimum"; "inverse" lets every window speak.
    Uniform weights with ``beta`` = windows - 1 and ``nucleus=1`` are naive Bayes itself:
    ``log p = sum_i log p_i - (windows - 1) log p_0``.

    A passage's citation mass is the sum over its windows of ``w_i`` times the attention that row i
    gives to its window, averaged over layers, heads and answer tokens; prefix and query get the
    rest of each row likewise.

    Attributes:
        weights: where the weights come from.
        pooling: what entropies are made into; read for "entropy" only.
        score_temperature: > 0; small for scores that lie close together (cosines: about 0.1).
        beta: >= 0, weight of the correction; None is 0.25 for "entropy", as in NBCE's code, and 0
            otherwise. Above 0 one more row is read, without a window.
        nucleus: above 0, at most 1.

    Raises:
        MethodError: a number outside its domain, or an unknown name.
    """

    weights: Weights = "uniform"
    pooling: EntropyPooling = "inverse"
    score_temperature: float = 1.0
    beta: float | None = None
    nucleus: float = 0.95

    name: ClassVar[str] = "ensemble"
    formula: ClassVar[str] = "log p = sum_i w_i log p(token | P, C_i, Q)"
    paper: ClassVar[str] = "arXiv:2305.15262, arXiv:2403.17552"

    def __post_init__(self) -> None:
        for name, value, names in (
            ("weights", self.weights, get_args(Weights)),
            ("pooling", self.pooling, get_args(EntropyPooling)),
        ):
            if value not in names:
                raise MethodError(f"ParallelEnsemble {name} must be one of {names}, got {value!r}.")
        if not finite(self.score_temperature) or self.score_temperature <= 0:
            raise MethodError(
                "ParallelEnsemble score_temperature must be a finite number above 0, got "
                f"{self.score_temperature!r}; 1 suits scores that differ by several units."
            )
        if self.beta is not None and (not finite(self.beta) or self.beta < 0):
            raise MethodError(
                f"ParallelEnsemble beta must be a finite number of at least 0, got {self.beta!r}; "
                "0 leaves the correction out."
            )
        if not finite(self.nucleus) or not 0 < self.nucleus <= 1:
            raise MethodError(
                "ParallelEnsemble nucleus must be above 0 and at most 1 (every token), got "
                f"{self.nucleus!r}."
            )

    @property
    def combination(self) -> Pooling:
        """Weights and formula, for the engine."""
        beta = self.beta
        if beta is None:
            beta = NBCE_BETA if self.weights == "entropy" else 0.0
        return Pooling(self.weights, self.pooling, self.score_temperature, beta, self.nucleus)
