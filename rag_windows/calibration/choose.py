"""From figures to a choice, and whether it holds on examples that did not make it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rag_windows.calibration.grid import finer
from rag_windows.calibration.measure import Table
from rag_windows.calibration.profile import MEASURE, Comparison, Figure, Mean, label, sign
from rag_windows.methods import Method

FOLDS = 4
RESAMPLES = 2000

FEWEST_OF_A_KIND = 4
"""Answers of each kind that the guard's threshold needs at least."""


def bootstrap(rows: Sequence[Sequence[float]], seed: int) -> list[Mean]:
    """Percentile bootstrap (B. Efron, Annals of Statistics 1979) of the mean of each row.

    All rows are resampled alike: entry ``i`` of each belongs to the same example.

    Args:
        rows: of equal lengths, at least one entry each.
        seed: of a private generator.
    """
    if not rows:
        return []
    count = len(rows[0])
    # torch's draws and not scipy's: the figures of profiles that users keep are from these.
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(count, (RESAMPLES, count), generator=generator).numpy()
    found = []
    for row in rows:
        values = np.asarray(row, dtype=np.float64)
        low, high = np.percentile(values[drawn].mean(axis=1), (2.5, 97.5))
        found.append(Mean(float(values.mean()), float(low), float(high)))
    return found


@dataclass(frozen=True, slots=True)
class Choice:
    """What a search chose.

    Attributes:
        best: the best setting on all examples.
        fine: settings of the second round.
        held_out: one comparison a criterion.
        folds: how many.
    """

    best: Method
    fine: tuple[Method, ...]
    held_out: tuple[Comparison, ...]
    folds: int


def search(
    coarse: Sequence[Method],
    default: Method,
    numbers: Sequence[int],
    criteria: Sequence[Figure],
    measure: Callable[[Sequence[Method]], Table],
    *,
    refine: bool,
    seed: int,
) -> Choice:
    """Choose among settings, and compare the choice with the default on held-out examples.

    Every fold makes the whole choice, the finer round included, on the examples outside of it.

    Args:
        coarse: settings of the first round; the default among them.
        default: what the choice is compared with.
        numbers: of the examples that decide.
        criteria: figures that decide, the later ones between equals.
        measure: measures settings on all examples and returns the table so far.
        refine: whether there is a second round.
        seed: of folds and intervals.
    """
    table = measure(coarse)
    folds = deal(numbers, min(FOLDS, len(numbers)), seed)
    choosing = [[number for number in numbers if number not in fold] for fold in folds]
    choosing.append(list(numbers))
    rounds: list[list[Method]] = [[] for _ in choosing]
    if refine:
        rounds = [finer(best_of(coarse, table, some, criteria), coarse) for some in choosing]
        table = measure([one for some in rounds for one in some])
    *held, best = (
        best_of([*coarse, *fine], table, some, criteria)
        for fine, some in zip(rounds, choosing, strict=True)
    )
    chosen_for = {
        number: chosen for fold, chosen in zip(folds, held, strict=True) for number in fold
    }
    comparisons = [
        compare(
            figure,
            [table[figure][chosen_for[number]][number] for number in numbers],
            [table[figure][default][number] for number in numbers],
            seed,
        )
        for figure in criteria
    ]
    fine = tuple(dict.fromkeys(one for some in rounds for one in some))
    return Choice(best, fine, tuple(comparisons), len(folds))


def best_of(
    settings: Iterable[Method], table: Table, numbers: Sequence[int], criteria: Sequence[str]
) -> Method:
    """The setting with the best means over these examples; of equal ones the first."""

    def key(method: Method) -> list[float]:
        means = (sum(table[name][method][n] for n in numbers) / len(numbers) for name in criteria)
        # Rounded, so that equal shares summed in another order are equal.
        return [round(-sign(name) * mean, 9) for name, mean in zip(criteria, means, strict=True)]

    return min(settings, key=key)


def deal(numbers: Sequence[int], folds: int, seed: int) -> list[set[int]]:
    """Deal examples into folds of like size, in an order drawn from the seed."""
    order = torch.randperm(len(numbers), generator=torch.Generator().manual_seed(seed)).tolist()
    return [{numbers[place] for place in order[fold::folds]} for fold in range(folds)]


def compare(
    figure: Figure, chosen: Sequence[float], default: Sequence[float], seed: int
) -> Comparison:
    """Compare two settings example by example."""
    direction = sign(figure)
    differences = [direction * (a - b) for a, b in zip(chosen, default, strict=True)]
    return Comparison(figure, *bootstrap([chosen, default, differences], seed))


def winning(held_out: Sequence[Comparison]) -> Comparison | None:
    """The comparison that makes the choice better than the default, or None if none does.

    The first criterion decides; where it says neither way, the next one may.
    """
    for one in held_out:
        if one.better:
            return one
        if one.worse or one.difference.value < 0:
            return None
    return None


def verdict(best: Method, default: Method, held_out: Sequence[Comparison]) -> tuple[bool, str]:
    """Whether the choice replaces the default, and a sentence that says why."""
    shown = "; ".join(_told(one) for one in held_out)
    if best == default:
        return False, f"The default {label(default)} is the best of all settings ({shown})."
    winner = winning(held_out)
    if winner is None:
        return False, (
            f"No setting beats the default {label(default)} on held-out examples beyond the noise, "
            f"so it stays: best on all examples is {label(best)}; {shown}."
        )
    return True, (
        f"{label(best)} beats the default {label(default)} on held-out examples by its "
        f"{winner.figure} ({shown})."
    )


def _told(one: Comparison) -> str:
    by = one.difference
    word = "better" if by.value >= 0 else "worse"
    return (
        f"{one.figure} {one.chosen.value:.4g} against {one.default.value:.4g}: {word} by "
        f"{abs(by.value):.2g}, 95% interval of the gain {by.low:.2g} to {by.high:.2g}"
    )


def multi_hop_threshold(single: Sequence[float], multi: Sequence[float]) -> dict[str, Any] | None:
    """The threshold that separates the attention's spreads of two kinds of answers best.

    An answer whose spread is above it is taken for multi-hop. Best is the least sum of both error
    rates; among equals, the middle of the widest gap.

    Args:
        single: spreads of answers from one passage, see `rag_windows.guard.attention_spread`.
        multi: spreads of answers from several.

    Returns:
        ``measure``, ``threshold``, ``false_alarms`` (share of single above it), ``missed`` (share
        of multi not above it), ``single_hop`` and ``multi_hop`` (their numbers); None where one
        kind has fewer than four.
    """
    if min(len(single), len(multi)) < FEWEST_OF_A_KIND:
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
