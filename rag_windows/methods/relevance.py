"""What retrieval scores say of windows, on the scale of log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def log_relevance(scores: Sequence[float]) -> torch.Tensor:
    """(windows,) fp32: the logarithm of each score's relevance, 0 for the best one.

    Positive scores (BM25, cosines, reciprocal ranks, probabilities) count by their ratio to the
    best. Where one is not positive (the logits of a re-ranker), differences count, as in a softmax.
    """
    import torch

    given = torch.tensor(list(scores), dtype=torch.float64)
    logs = given.log() if bool((given > 0).all()) else given
    return (logs - logs.max()).float()
