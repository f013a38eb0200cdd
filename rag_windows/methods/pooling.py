"""From one next-token distribution a window to one for all of them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Literal

import torch

from rag_windows.errors import InputError

Weights = Literal["uniform", "retrieval", "entropy"]
EntropyPooling = Literal["inverse", "minimum"]

LOWEST = -1e4
"""Log-probabilities below this count as this, so that zero weights and differences stay finite."""

SUREST = 1e-3
"""Entropy in nats below which a window gets no surer: its inverse is its weight."""


@dataclass(frozen=True, slots=True)
class Pooling:
    """How `ParallelEnsemble` weighs and combines; its docstring has the formulas.

    Shapes: ``logprobs`` are (queries, windows, tokens, vocabulary), each row normalised.

    Attributes:
        weights: what a window's weight comes from.
        pooling: how entropies become weights.
        score_temperature: divides retrieval scores before their softmax.
        beta: weight of what the answer without any window takes away.
        nucleus: share of probability whose tokens that correction concerns.
    """

    weights: Weights
    pooling: EntropyPooling
    score_temperature: float
    beta: float
    nucleus: float

    @property
    def prior(self) -> bool:
        """Whether `combine` needs the distributions of the query without any window."""
        return self.beta != 0

    def check(self, scores: Sequence[float | None], names: Sequence[str]) -> None:
        """Refuse scores that can't be weights, before any work.

        Args:
            scores: of each window.
            names: how errors call each.

        Raises:
            InputError: retrieval scores are wanted, and one is missing or no finite number.
        """
        if self.weights != "retrieval":
            return
        for score, name in zip(scores, names, strict=True):
            if not isinstance(score, Real) or not abs(score) <= sys.float_info.max:
                raise InputError(
                    f"{name} has the score {score!r}, and weights='retrieval' needs a finite score "
                    "of every passage. Pass Passage(text, score=...), or choose weights='uniform' "
                    "or 'entropy'."
                )

    def fixed(self, scores: Sequence[float], groups: Sequence[int]) -> torch.Tensor | None:
        """Weights that no step changes.

        Args:
            scores: of each window; read for "retrieval" only.
            groups: passage of each window. One that was cut into several windows has one weight,
                which they share.

        Returns:
            (windows,) fp32, summing to one; None where weights come from the distributions.

        Raises:
            InputError: see `check`.
        """
        if self.weights == "entropy":
            return None
        if self.weights == "uniform":
            return torch.full((len(groups),), 1 / len(groups))
        names = [f"Window {number}" for number in range(len(groups))]
        self.check(scores or [None] * len(groups), names)
        index = torch.tensor(list(groups))
        share = torch.bincount(index)[index].double().reciprocal()
        logits = torch.tensor(list(scores), dtype=torch.float64) / self.score_temperature
        weights = (logits - logits.max()).exp() * share
        return (weights / weights.sum()).float()

    def weigh(self, logprobs: torch.Tensor, fixed: torch.Tensor | None) -> torch.Tensor:
        """Weight of each window for each token.

        Args:
            logprobs: of the windows.
            fixed: from `fixed`.

        Returns:
            (queries, windows, tokens) in the dtype of ``logprobs``, summing to one over windows.
        """
        queries, windows, tokens, _ = logprobs.shape
        if fixed is not None:
            return fixed.to(logprobs).view(1, -1, 1).expand(queries, windows, tokens)
        entropy = _entropy(logprobs)
        if self.pooling == "minimum":
            chosen = torch.zeros_like(entropy)
            return chosen.scatter_(1, entropy.argmin(dim=1, keepdim=True), 1.0)
        surety = entropy.clamp_min(SUREST).reciprocal()
        return surety / surety.sum(dim=1, keepdim=True)

    def combine(
        self, logprobs: torch.Tensor, weights: torch.Tensor, prior: torch.Tensor | None
    ) -> torch.Tensor:
        """One distribution for all windows.

        Args:
            logprobs: of the windows.
            weights: from `weigh`.
            prior: (queries, tokens, vocabulary) log-probabilities without any window; needed where
                `prior` says so.

        Returns:
            (queries, tokens, vocabulary) log-probabilities, normalised, in that dtype.
        """
        pooled = torch.einsum("qwt,qwtv->qtv", weights, logprobs.clamp_min(LOWEST))
        pooled = pooled.log_softmax(dim=-1)
        if not self.prior or prior is None:
            return pooled
        gain = pooled.clamp_min(LOWEST) - prior.clamp_min(LOWEST)
        if self.nucleus < 1:
            gain = gain.where(self._likely(pooled) & self._likely(prior), 0.0)
        return (pooled + self.beta * gain).log_softmax(dim=-1)

    def _likely(self, logprobs: torch.Tensor) -> torch.Tensor:
        """The fewest tokens that hold a share ``nucleus`` of the probability; bool, same shape."""
        ordered, index = logprobs.sort(dim=-1, descending=True)
        shares = ordered.exp()
        inside = shares.cumsum(dim=-1) - shares < self.nucleus
        return torch.zeros_like(inside).scatter_(-1, index, inside)


def _entropy(logprobs: torch.Tensor) -> torch.Tensor:
    """Entropy over the last dimension, in nats."""
    return -(logprobs.exp() * logprobs.clamp_min(LOWEST)).sum(dim=-1)
