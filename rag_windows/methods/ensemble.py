"""Parallel Ensemble, and naive Bayes context extension as its entropy-weighted form."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING, ClassVar, Literal

from rag_windows.errors import InputError
from rag_windows.methods.base import finite
from rag_windows.methods.combination import Combination, RowLogits

if TYPE_CHECKING:
    import torch

Weights = Literal["uniform", "retrieval", "entropy"]
EntropyPooling = Literal["inverse", "minimum"]

LOWEST = -1e4
"""Log-probabilities below this count as this, so that zero weights and differences stay finite."""

SUREST = 1e-3
"""Entropy in nats below which a window gets no surer: its inverse is its weight."""


@dataclass(frozen=True, slots=True)
class ParallelEnsemble(Combination):
    """Each window answers on its own; their next-token probabilities are combined into one.

    Sources: Yang et al., "Revisiting Parallel Context Windows", https://arxiv.org/abs/2305.15262
    (a weighted sum of what the windows answer); Su et al., "Naive Bayes-based Context Extension
    for Large Language Models", https://arxiv.org/abs/2403.17552 (NBCE). Row i reads the prefix P,
    window C_i and the query Q, whose first token stands in every row behind the longest window;
    inside a row nothing is rescaled. With ``p_i = p(token | P, C_i, Q)`` and ``p_0 = p(token | P,
    Q)``, asked at the same positions:

        pooled   = sum_i w_i log p_i, normalised
        combined = (1 + beta) pooled - beta log p_0, normalised

    One token is chosen for all rows: greedy decoding, sampling, beams and scores read ``combined``
    as they would read the model's logits. Uniform weights with ``beta`` = windows - 1 and
    ``nucleus=1`` are naive Bayes itself: ``log p = sum_i log p_i - (windows - 1) log p_0``.

    A passage's citation mass is the sum over its windows of ``w_i`` times the attention that row i
    gives to its window, averaged over layers, heads and answer tokens; prefix and query get the
    rest of each row likewise.

    Attributes:
        weights: "uniform": 1 / number of windows. "retrieval": softmax over passages of score /
            ``score_temperature``; a passage that was cut into several windows shares its weight
            among them. "entropy": for each token again, from the entropy H_i of p_i.
        pooling: of entropies; "inverse": 1 / H_i, normalised; "minimum": 1 for the surest window,
            NBCE's own choice.
        score_temperature: > 0; small for scores that lie close together (cosines: about 0.1).
        beta: >= 0, weight of the correction; None is 0.25 for "entropy", as in NBCE's code, and 0
            otherwise. Above 0 one more row is read, without a window.
        nucleus: above 0, at most 1; only tokens in the nucleus of both pooled and p_0 (the fewest
            that hold so much of the probability) are corrected, as in NBCE's released code.
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
        heat, beta, nucleus = self.score_temperature, self.beta, self.nucleus
        self.require_one("weights", Weights)
        self.require_one("pooling", EntropyPooling)
        self.require("score_temperature", finite(heat) and heat > 0, "a finite number above 0")
        corrects = beta is None or (finite(beta) and beta >= 0)
        self.require("beta", corrects, "a finite number of at least 0, or None")
        self.require("nucleus", finite(nucleus) and 0 < nucleus <= 1, "above 0 and at most 1")

    @property
    def correction(self) -> float:
        """Beta, or its default where it is None."""
        if self.beta is not None:
            return self.beta
        return 0.25 if self.weights == "entropy" else 0.0

    @property
    def prior(self) -> bool:
        """Whether `combine` needs the distributions of the query without any window."""
        return self.correction != 0

    def check(self, scores: Sequence[float | None], names: Sequence[str]) -> None:
        """Refuse scores of windows that can't be weights; ``names`` is how errors call them."""
        if self.weights != "retrieval":
            return
        for score, name in zip(scores, names, strict=True):
            if not isinstance(score, Real) or not abs(score) <= sys.float_info.max:
                raise InputError(
                    f"{name} has the score {score!r}, but weights='retrieval' needs a finite "
                    "score for every passage. Pass Passage(text, score=...), or choose "
                    "weights='uniform' or 'entropy'."
                )

    def fixed(self, scores: Sequence[float], groups: Sequence[int]) -> torch.Tensor | None:
        """(windows,) fp32 weights by score and passage of each window; None for "entropy"."""
        import torch

        if self.weights == "entropy":
            return None
        if self.weights == "uniform":
            return torch.full((len(groups),), 1 / len(groups), dtype=torch.float32)
        index = torch.tensor(list(groups))
        share = torch.bincount(index)[index].double().reciprocal()
        logits = torch.tensor(list(scores), dtype=torch.float64) / self.score_temperature
        weights = (logits - logits.max()).exp() * share
        return (weights / weights.sum()).float()

    def weigh(self, logprobs: torch.Tensor, fixed: torch.Tensor | None) -> torch.Tensor:
        """Weight of each window for each token: (queries, windows, tokens), summing to one.

        ``logprobs`` (queries, windows, tokens, vocabulary) are the windows' own, normalised.
        """
        queries, windows, tokens, _ = logprobs.shape
        if fixed is not None:
            return fixed.to(logprobs).view(1, -1, 1).expand(queries, windows, tokens)
        entropy = -(logprobs.exp() * logprobs.clamp_min(LOWEST)).sum(dim=-1)
        if self.pooling == "minimum":
            chosen = entropy.new_zeros(entropy.shape)
            return chosen.scatter_(1, entropy.argmin(dim=1, keepdim=True), 1.0)
        surety = entropy.clamp_min(SUREST).reciprocal()
        return surety / surety.sum(dim=1, keepdim=True)

    def combine(self, rows: RowLogits) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Combination.combine`."""
        import torch

        logprobs = rows.logits.log_softmax(dim=-1)
        weights = self.weigh(logprobs, rows.fixed)
        pooled = torch.einsum("qwt,qwtv->qtv", weights, logprobs.clamp_min(LOWEST))
        pooled = pooled.log_softmax(dim=-1)
        if not self.prior or rows.prior is None:
            return pooled, weights
        prior = rows.prior.log_softmax(dim=-1)
        gain = pooled.clamp_min(LOWEST) - prior.clamp_min(LOWEST)
        if self.nucleus < 1:
            gain = gain.where(self._likely(pooled) & self._likely(prior), 0.0)
        return (pooled + self.correction * gain).log_softmax(dim=-1), weights

    def _likely(self, logprobs: torch.Tensor) -> torch.Tensor:
        """The fewest tokens that hold a share ``nucleus`` of the probability; bool, same shape."""
        ordered, index = logprobs.sort(dim=-1, descending=True)
        shares = ordered.exp()
        inside = shares.cumsum(dim=-1) - shares < self.nucleus
        return inside.new_zeros(inside.shape).scatter_(-1, index, inside)
