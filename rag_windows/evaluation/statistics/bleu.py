"""BLEU for many draws of the same sentences at once.

`sacrebleu.significance.PairedTest` draws sentences apart from each other; the turns of one
conversation go together, so it would call intervals too narrow. Whole conversations need nothing
but BLEU from sums of counts. `sacrebleu.BLEU.compute_bleu` gives that for one draw at a time, here
is the same formula for an array of them.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Protocol

import numpy as np

from rag_windows.evaluation.statistics.parts import Array

if TYPE_CHECKING:
    from collections.abc import Sequence

ORDER = 4


class Counted(Protocol):
    """What `sacrebleu.BLEU.corpus_score` gives, as far as it is used here."""

    counts: list[int]
    totals: list[int]
    sys_len: int
    ref_len: int


def bleu_row(score: Counted) -> tuple[float, ...]:
    """Right n-grams, n-grams, length and length of the closest reference of one sentence.

    Args:
        score: of a corpus that is this sentence alone, with all its references; orders 1 to 4.
    """
    counts: Sequence[float] = (*score.counts, *score.totals, score.sys_len, score.ref_len)
    return tuple(float(one) for one in counts)


def bleu(sums: Array) -> Array:
    """BLEU-4 with exponential smoothing, sacrebleu's default (Post, WMT 2018).

    Args:
        sums: (..., 10), sums of `bleu_row` over sentences.

    Returns:
        (...) percent; 0 where nothing matches.
    """
    right, total = sums[..., :ORDER], sums[..., ORDER : 2 * ORDER]
    length, reference = sums[..., -2], sums[..., -1]
    missed = right == 0
    # The n-th order without a match counts as 1/2^n matches.
    smoothed = np.where(missed, 0.5 ** np.cumsum(missed, axis=-1), right)
    with np.errstate(divide="ignore", invalid="ignore"):
        precision = np.log(smoothed / total).mean(axis=-1) + math.log(100)
        brevity = np.minimum(0.0, 1 - reference / length)
        found = np.exp(precision + brevity)
    empty = missed.all(axis=-1) | (total == 0).any(axis=-1) | (length == 0)
    return np.where(empty, 0.0, found)
