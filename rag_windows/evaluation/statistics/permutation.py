"""Whether two methods differ on the same questions by more than chance.

If both were alike, the two answers to a question could as well have been exchanged. A paired
permutation test (R. A. Fisher, The Design of Experiments, 1935) exchanges them at random and counts
how often the methods then differ at least as much as they do; in machine translation it is called
approximate randomisation (E. W. Noreen 1989; S. Riezler, J. T. Maxwell 2005). Here all answers of a
group are exchanged together, since they go together. For a mean this flips signs of the groups'
sums of differences.

`scipy.stats.permutation_test(permutation_type="samples")` computes the same, and the tests compare
with it, but it draws permutations anew for each pair of methods and each metric, 0.16 s a time with
86 groups; here ten methods and six metrics take 0.5 s together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from rag_windows.evaluation.statistics.parts import Array, Formula
from rag_windows.evaluation.statistics.resampling import blocks, generator

FLIPS = 10_000
_STREAM = 3
# Percentage points; sums in another order differ by far less, and are no smaller difference.
_TIE = 1e-9


def p_values(sums: Array, base: int, formula: Formula, flips: int = FLIPS) -> list[float]:
    """Two-sided p values of every arm against one of them.

    Exact where there are no more ways to exchange than ``flips``. Else that many are drawn, and
    the observed one counts beside them (B. Phipson, G. K. Smyth 2010), so that p is never 0.

    Args:
        sums: (groups, arms, k), of the metric's parts over each group's examples.
        base: place of the arm compared with.
        formula: (..., k) sums to (...) percent.
        flips: how many.

    Returns:
        One an arm: 1 for the base; NaN where an arm or the base has no value.
    """
    groups, arms, size = sums.shape
    change = sums[:, [base], :] - sums
    whole = sums.sum(axis=0)
    values = formula(whole)
    observed = np.abs(values - values[base])
    as_far = np.zeros(arms)
    exact = is_exact(groups, flips)
    for exchanged in _exchanges(groups, flips, exact):
        moved = (exchanged @ change.reshape(groups, -1)).reshape(-1, arms, size)
        apart = np.abs(formula(whole + moved) - formula(whole[base] - moved))
        # What can't be computed for an exchange counts against a difference.
        as_far += (~(apart < observed - _TIE)).sum(axis=0)
    p = as_far / 2**groups if exact else (as_far + 1) / (flips + 1)
    return np.where(np.isnan(observed), np.nan, p).tolist()


def is_exact(groups: int, flips: int = FLIPS) -> bool:
    """Whether all exchanges are tried instead of drawn ones."""
    return groups < 63 and 2**groups <= flips


def _exchanges(groups: int, flips: int, exact: bool) -> Iterator[Array]:
    """(rows, groups) at a time, 1 where a group's answers are exchanged."""
    if exact:
        ways = np.arange(2**groups)[:, None]
        yield (ways >> np.arange(groups) & 1).astype(np.float64)
        return
    rng = generator(groups, _STREAM)
    for rows in blocks(flips, groups):
        yield rng.integers(2, size=(rows, groups), dtype=np.int8).astype(np.float64)


def holm(p: Sequence[float]) -> list[float]:
    """S. Holm's step-down correction (Scandinavian Journal of Statistics 1979).

    Rejecting what stays below a level errs with at most that chance in the whole family. scipy has
    corrections of the false discovery rate only.

    Args:
        p: of one family; NaN stays NaN and is no member.
    """
    members = sorted((value, place) for place, value in enumerate(p) if not np.isnan(value))
    corrected = list(p)
    highest = 0.0
    for rank, (value, place) in enumerate(members):
        highest = max(highest, min(1.0, value * (len(members) - rank)))
        corrected[place] = highest
    return corrected
