"""How much distributions differ from each other."""

from __future__ import annotations

import torch


def jensen_shannon(logprobs: torch.Tensor, weights: torch.Tensor) -> float:
    """Generalised Jensen-Shannon divergence: entropy of the mixture less mean entropy.

    ``H(sum_i w_i p_i) - sum_i w_i H(p_i)``; 0 if all are equal, at most the entropy of the weights.
    Source: Lin, "Divergence measures based on the Shannon entropy", 1991, section 5.

    Args:
        logprobs: (n, vocabulary), normalised.
        weights: (n,), from 0 on, not all 0; they are normalised here.

    Returns:
        Nats, from 0 on; computed in fp64.
    """
    weights = weights.double() / weights.double().sum()
    probabilities = logprobs.double().exp()
    mixture = weights @ probabilities
    inside = (weights * _entropy(probabilities)).sum()
    return max(0.0, float(_entropy(mixture) - inside))


def _entropy(probabilities: torch.Tensor) -> torch.Tensor:
    return -torch.xlogy(probabilities, probabilities).sum(dim=-1)
