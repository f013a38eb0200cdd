"""The label that a model finds likeliest, and how likely it finds each."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from rag_windows.errors import InputError
from rag_windows.learning.labels import Labels
from rag_windows.prompt import Note

Normalize = Literal["sum", "mean"]


@dataclass(frozen=True, slots=True)
class Classification:
    """One text's label.

    Attributes:
        text: as given.
        label: the one with the highest score; the first of equals.
        scores: of each label: its log-probability in nats, as a sum or as the mean of its tokens,
            and minus that of content-free inputs where these were asked for.
        probabilities: of each label, the softmax of the scores: among these labels only.
        windows: how many windows of demonstrations were read.
        notes: what the caller should know about a window, such as one that repeats another.
    """

    text: str
    label: str
    scores: Mapping[str, float]
    probabilities: Mapping[str, float]
    windows: int = 0
    notes: tuple[Note, ...] = field(default=(), repr=False)


def check_normalize(normalize: str) -> None:
    """Refuse anything but "sum" and "mean".

    Raises:
        InputError: saying so.
    """
    if normalize not in ("sum", "mean"):
        raise InputError(f"normalize={normalize!r} must be 'sum' or 'mean'.")


def scores_of(labels: Labels, sums: Sequence[float], normalize: Normalize) -> list[float]:
    """Each label's score from the sums of its tokens' log-probabilities."""
    values = labels.apart(sums)
    if normalize == "mean":
        return [value / len(ids) for value, ids in zip(values, labels.ids, strict=True)]
    return values


def content_free(rows: Sequence[Sequence[float]]) -> list[float]:
    """What to take from the scores: labels' log-probabilities given inputs that say nothing.

    Contextual calibration (https://arxiv.org/abs/2102.09690, section 5): ``q = softmax(W p)`` with
    ``W = diag(p_cf)^-1``, where ``p_cf`` is the mean of the label probabilities over content-free
    inputs. The label of highest ``q`` is that of highest ``log p - log p_cf``, and here the softmax
    of this difference is the probability.

    Args:
        rows: scores of the labels, one row an input.
    """
    probabilities = [softmax(row) for row in rows]
    means = [math.fsum(column) / len(rows) for column in zip(*probabilities, strict=True)]
    return [math.log(max(mean, sys.float_info.min)) for mean in means]


def classified(
    text: str, labels: Labels, scores: Sequence[float], windows: int, notes: tuple[Note, ...]
) -> Classification:
    """The result that a text's scores make."""
    names = labels.names
    return Classification(
        text=text,
        label=names[max(range(len(names)), key=lambda index: scores[index])],
        scores=dict(zip(names, scores, strict=True)),
        probabilities=dict(zip(names, softmax(scores), strict=True)),
        windows=windows,
        notes=notes,
    )


def softmax(scores: Sequence[float]) -> list[float]:
    """Probabilities from log-probabilities up to a constant."""
    return [math.exp(score) for score in log_softmax(scores)]


def log_softmax(scores: Sequence[float]) -> list[float]:
    """Log-probabilities that sum to one, from those up to a constant."""
    highest = max(scores)
    total = highest + math.log(math.fsum(math.exp(score - highest) for score in scores))
    return [score - total for score in scores]
