"""Parallel context-of-experts decoding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from rag_windows.methods.base import finite
from rag_windows.methods.combination import Combination, RowLogits
from rag_windows.methods.relevance import log_relevance

if TYPE_CHECKING:
    import torch

_LEAST = 1e-9
"""Probabilities below this count as this in a divergence."""


@dataclass(frozen=True, slots=True)
class PCED(Combination):
    """Each window answers on its own; each token is taken from the row that is surest of it.

    Source: "Parallel Context-of-Experts Decoding for Retrieval Augmented Generation",
    https://arxiv.org/abs/2601.08670, in the form of the released code. Row i reads the prefix P,
    window C_i and the query Q, whose first token stands in every row behind the longest window;
    row 0 reads P and Q. With their logits ``s_i`` and ``s_0`` and the relevance ``r_i``:

        s'_i = (1 + beta) s_i - beta s_0 + gamma log r_i
        token = argmax over vocabulary and rows

    Other decoding (sampling, beams, scores) reads the softmax of the largest
    ``s'_i`` of each token of the vocabulary. The row with the largest ``s'_i`` has the token's
    citation: a passage's mass is the share of the answer's tokens that its windows won, times the
    attention that these rows gave to their windows.

    Attributes:
        beta: weight of the contrast with row 0, finite and at least 0. None: of each row and token
            of the vocabulary, from the first token of the answer on, its term of the
            Jensen-Shannon divergence of ``softmax(s_i)`` and ``softmax(s_0)``, from 0 to 1.
        gamma: weight of relevance, finite and at least 0. The relevance of a passage comes from
            `Passage.score`, see `rag_windows.methods.relevance.log_relevance`; if a passage has
            none, none of them counts.
    """

    beta: float | None = None
    gamma: float = 2.5

    name: ClassVar[str] = "pced"
    formula: ClassVar[str] = "s'_i = (1 + beta) s_i - beta s_0 + gamma log r_i, largest of all rows"
    paper: ClassVar[str] = "arXiv:2601.08670"

    def __post_init__(self) -> None:
        beta, gamma = self.beta, self.gamma
        contrasts = beta is None or (finite(beta) and beta >= 0)
        self.require("beta", contrasts, "a finite number of at least 0, or None")
        self.require("gamma", finite(gamma) and gamma >= 0, "a finite number of at least 0")

    @property
    def prior(self) -> bool:
        """Whether rows are contrasted with one that reads no window."""
        return self.beta != 0

    @property
    def starts(self) -> bool:
        """Whether the contrast is that of the answer's first token."""
        return self.beta is None

    def fixed(self, scores: Sequence[float], groups: Sequence[int]) -> torch.Tensor | None:
        """``gamma log r_i`` of each window."""
        return self.gamma * log_relevance(scores) if scores and self.gamma else None

    def combine(self, rows: RowLogits) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Combination.combine`."""
        import torch

        contrasted = rows.logits
        if rows.prior is not None:
            prior = rows.prior.unsqueeze(1)
            if self.beta is None and "beta" not in rows.memory:
                first = divergence(rows.logits[:, :, 0], prior[:, :, 0]).clamp(0.0, 1.0)
                rows.memory["beta"] = first
            beta = self.beta if self.beta is not None else rows.memory["beta"].unsqueeze(2)
            # One pass over all logits: prior + (1 + beta) (logits - prior).
            contrasted = torch.lerp(prior, contrasted, 1 + beta)
        if rows.fixed is not None:
            contrasted = contrasted + rows.fixed.to(contrasted).view(1, -1, 1, 1)
        winners = contrasted.amax(dim=-1).argmax(dim=1, keepdim=True)
        weights = torch.zeros_like(contrasted[..., 0]).scatter_(1, winners, 1.0)
        return contrasted.amax(dim=1).log_softmax(dim=-1), weights


def divergence(logits: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """The terms, one for each token, whose sum is the Jensen-Shannon divergence, in nats.

    ``logits`` and ``others`` (..., vocabulary) are broadcast against each other.
    """
    p, q = (one.softmax(dim=-1).clamp_min(_LEAST) for one in (logits, others))
    middle = ((p + q) / 2).log()
    return (p * (p.log() - middle) + q * (q.log() - middle)) / 2
