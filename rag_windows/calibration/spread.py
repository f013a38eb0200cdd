"""How far the attention of an answer is spread over the passages, and where multi-hop begins."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

MEASURE = "1 - sum of squared shares"
FEWEST = 4
"""Answers of each kind that a threshold needs at least."""


def guard_of(single: Sequence[float], multi: Sequence[float]) -> dict[str, Any] | None:
    """The threshold that separates the spreads of two kinds of answers best.

    An answer whose spread is above it is taken for multi-hop. Best is the least sum of both error
    rates; among equals, the middle of the widest gap.

    Args:
        single: spreads of answers from one passage.
        multi: spreads of answers from several.

    Returns:
        ``measure``, ``threshold``, ``false_alarms`` (share of single above it), ``missed`` (share
        of multi not above it), ``single_hop`` and ``multi_hop`` (their numbers); None where one
        kind has fewer than four.
    """
    if min(len(single), len(multi)) < FEWEST:
        return None
    points = sorted({0.0, 1.0, *single, *multi})
    # A cut in the middle of every gap; the gap's width decides between cuts of equal error.
    cuts = [((a + b) / 2, b - a) for a, b in itertools.pairwise(points)]

    def errors(threshold: float) -> tuple[float, float]:
        false_alarms = sum(spread > threshold for spread in single) / len(single)
        missed = sum(spread <= threshold for spread in multi) / len(multi)
        return false_alarms, missed

    threshold, _ = min(cuts, key=lambda cut: (sum(errors(cut[0])), -cut[1]))
    false_alarms, missed = errors(threshold)
    return {
        "measure": MEASURE,
        "threshold": threshold,
        "false_alarms": false_alarms,
        "missed": missed,
        "single_hop": len(single),
        "multi_hop": len(multi),
    }


def guard_problem(value: Any) -> str | None:
    """What is wrong with a guard that was read from a file; None if nothing is."""
    if value is None:
        return None
    wanted = {"measure", "threshold", "false_alarms", "missed", "single_hop", "multi_hop"}
    if not isinstance(value, Mapping) or set(value) != wanted:
        return f"must be null or an object with exactly the entries {sorted(wanted)}"
    if value["measure"] != MEASURE:
        return f"unknown measure {value['measure']!r}; this version knows {MEASURE!r}"
    for name in ("threshold", "false_alarms", "missed"):
        share = value[name]
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
            return f"{name} must be a number from 0 to 1, got {share!r}"
    return None
