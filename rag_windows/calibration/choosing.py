"""From a table of figures to a choice, and whether it holds on examples that did not choose it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from rag_windows.calibration.grid import finer
from rag_windows.calibration.intervals import bootstrap
from rag_windows.calibration.measuring import Table
from rag_windows.calibration.method_json import label
from rag_windows.calibration.profile import Comparison, sign
from rag_windows.methods import Method

FOLDS = 4


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
    criteria: Sequence[str],
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
    views = [[number for number in numbers if number not in fold] for fold in folds]
    views.append(list(numbers))
    rounds: list[list[Method]] = [[] for _ in views]
    if refine:
        firsts = [best_of(coarse, table, view, criteria) for view in views]
        rounds = [finer(first, coarse) for first in firsts]
        table = measure([one for some in rounds for one in some])
    *held, best = (
        best_of([*coarse, *fine], table, view, criteria)
        for fine, view in zip(rounds, views, strict=True)
    )
    chosen_for = {
        number: chosen for fold, chosen in zip(folds, held, strict=True) for number in fold
    }
    comparisons = [
        compare(
            figure,
            [table[figure][chosen_for[n]][n] for n in numbers],
            [table[figure][default][n] for n in numbers],
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

    def key(method: Method) -> tuple[float, ...]:
        means = (sum(table[name][method][n] for n in numbers) / len(numbers) for name in criteria)
        # Rounded, so that equal shares summed in another order are equal.
        return tuple(
            round(-sign(name) * mean, 9) for name, mean in zip(criteria, means, strict=True)
        )

    return min(settings, key=key)


def deal(numbers: Sequence[int], folds: int, seed: int) -> list[set[int]]:
    """Deal examples into folds of like size, in an order drawn from the seed."""
    order = torch.randperm(len(numbers), generator=torch.Generator().manual_seed(seed)).tolist()
    return [{numbers[place] for place in order[fold::folds]} for fold in range(folds)]


def compare(
    figure: str, chosen: Sequence[float], default: Sequence[float], seed: int
) -> Comparison:
    """Compare two settings example by example."""
    direction = sign(figure)
    differences = [direction * (a - b) for a, b in zip(chosen, default, strict=True)]
    return Comparison(figure, *bootstrap([chosen, default, differences], seed))


def beats(held_out: Sequence[Comparison]) -> Comparison | None:
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
    shown = "; ".join(_figures(one) for one in held_out)
    if best == default:
        return False, f"The default {label(default)} is the best of all settings ({shown})."
    winner = beats(held_out)
    if winner is None:
        return False, (
            f"No setting beats the default {label(default)} on held-out examples beyond the noise, "
            f"so it stays: best on all examples is {label(best)}; {shown}."
        )
    return True, (
        f"{label(best)} beats the default {label(default)} on held-out examples by its "
        f"{winner.figure} ({shown})."
    )


def _figures(one: Comparison) -> str:
    by = one.difference
    word = "better" if by.value >= 0 else "worse"
    return (
        f"{one.figure} {one.chosen.value:.4g} against {one.default.value:.4g}: {word} by "
        f"{abs(by.value):.2g}, 95% interval of the gain {by.low:.2g} to {by.high:.2g}"
    )
