"""Which settings are tried, which is the best, and whether that holds on other examples."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rag_windows.calibration.profile import (
    Comparison,
    Figure,
    Mean,
    label,
    sign,
    varying,
)
from rag_windows.errors import InputError, MethodError
from rag_windows.methods import APE, Method
from rag_windows.methods.mateicl import SCHEDULES
from rag_windows.methods.registry import numbers_of, with_parameters

VALUES = (0.3, 0.5, 0.7, 0.8, 0.9, 1.0, 1.1)
"""Coarse values of APE's temperature and scale; the paper searches 0.1 to 1.0."""

GRIDS: Mapping[str, Mapping[str, Sequence[Any]]] = {
    "ape": {"temperature": VALUES, "scale": VALUES},
    "deep-thinking": {"steps": (1, 2, 5, 10), "eta": (0.003, 0.01, 0.03, 0.1)},
    "mateicl": {"schedule": (*SCHEDULES, 1.0, 1.5, 2.0, 3.0, 5.0, 8.0)},
}
"""Coarse values of methods that have a grid of their own."""

FOLDS = 4
RESAMPLES = 2000

Table = dict[Figure, dict[Method, list[float]]]
"""figure -> setting -> a value for each example."""


def ape_grid(
    temperatures: Iterable[float] = VALUES, scales: Iterable[float] = VALUES
) -> tuple[Method, ...]:
    """APE at every pair of temperature and scale."""
    return tuple(itertools.starmap(APE, itertools.product(temperatures, scales)))


def default_grid(method: Method) -> tuple[Method, ...]:
    """The settings that are tried for a method where no grid is given.

    Where `GRIDS` has none, each number in its fields is tried at its value times 1/4, 1/2, 1, 2
    and 4 (whole numbers stay whole and at least 1), in all combinations. What a method refuses is
    left out; the numbers of a reader inside it stay as they are.

    Raises:
        InputError: the method has no numbers to choose.
    """
    values = GRIDS.get(method.name)
    if values is None:
        # What the reader of a method does is the reader's own: calibrate that one first.
        own = {field.name for field in dataclasses.fields(method)}
        found = numbers_of(method).items()
        values = {name: _around(value) for name, value in found if name in own}
    if not values:
        raise InputError(
            f"The method {method.name!r} has no numbers to choose; calibrate one that has, such as "
            "'ape', or give settings= as a list of methods."
        )
    return tuple(_combinations(method, values))


def _around(value: float) -> tuple[float, ...]:
    factors = (0.25, 0.5, 1, 2, 4)
    if isinstance(value, int):
        return tuple(sorted({max(1, round(value * factor)) for factor in factors}))
    return tuple(value * factor for factor in factors)


def _combinations(method: Method, values: Mapping[str, Sequence[Any]]) -> list[Method]:
    """The method at every combination of values that it takes."""
    made: dict[Method, None] = {}
    for combination in itertools.product(*values.values()):
        try:
            made[with_parameters(method, dict(zip(values, combination, strict=True)))] = None
        except MethodError:
            continue
    return list(made)


def finer(best: Method, settings: Sequence[Method]) -> list[Method]:
    """Settings half-way between the best one and its neighbours in the grid, in every direction.

    Half-way is the geometric mean (the mean where a value is not positive), rounded to three
    digits; a whole number has neighbours half-way only where there is a whole number between.
    """
    here = numbers_of(best)
    choices: dict[str, list[float]] = {}
    for name, values in varying(one for one in settings if type(one) is type(best)).items():
        if name in here:  # not where it is a number in other settings, and a word in this one
            place = values.index(here[name])
            near = values[max(0, place - 1) : place + 2]
            choices[name] = sorted({_half_way(here[name], other) for other in near})
    known = set(settings)
    return [one for one in _combinations(best, choices) if one not in known]


def _half_way(one: float, other: float) -> float:
    if one == other:
        return one
    if isinstance(one, int) and isinstance(other, int):
        return (one + other) // 2
    if one > 0 and other > 0:
        return float(f"{math.sqrt(one * other):.3g}")
    return (one + other) / 2


@dataclass(frozen=True, slots=True)
class Choice:
    """The best setting on all examples, those of the second round, and how choices held out."""

    best: Method
    fine: tuple[Method, ...]
    held_out: tuple[Comparison, ...]
    folds: int


def search(
    coarse: Sequence[Method],
    default: Method,
    examples: int,
    criteria: Sequence[Figure],
    measure: Callable[[Sequence[Method]], Table],
    *,
    refine: bool,
    seed: int,
) -> Choice:
    """Choose among settings, and compare the choice with the default on held-out examples.

    Every fold makes the whole choice, the finer round included, on the examples outside of it. The
    first of ``criteria`` decides, the later ones between equals; ``measure`` measures settings on
    all examples and returns the table so far.
    """
    table = measure(coarse)
    order = torch.randperm(examples, generator=torch.Generator().manual_seed(seed)).tolist()
    count = min(FOLDS, examples)
    folds = [order[fold::count] for fold in range(count)]
    choosing = [[one for one in range(examples) if one not in fold] for fold in folds]
    choosing.append(list(range(examples)))
    rounds: list[list[Method]] = [[] for _ in choosing]
    if refine:
        rounds = [finer(_best(coarse, table, some, criteria), coarse) for some in choosing]
        table = measure([one for some in rounds for one in some])
    *held, best = (
        _best([*coarse, *fine], table, some, criteria)
        for fine, some in zip(rounds, choosing, strict=True)
    )
    chose = {number: one for fold, one in zip(folds, held, strict=True) for number in fold}
    comparisons = []
    for figure in criteria:
        rows = table[figure]
        chosen = [rows[chose[number]][number] for number in range(examples)]
        gains = [sign(figure) * (a - b) for a, b in zip(chosen, rows[default], strict=True)]
        means = bootstrap([chosen, rows[default], gains], seed)
        comparisons.append(Comparison(figure, *means))
    fine = tuple(dict.fromkeys(one for some in rounds for one in some))
    return Choice(best, fine, tuple(comparisons), count)


def _best(
    settings: Iterable[Method], table: Table, numbers: Sequence[int], criteria: Sequence[Figure]
) -> Method:
    """The setting with the best means over these examples; of equal ones the first."""

    def key(method: Method) -> list[float]:
        means = (sum(table[name][method][n] for n in numbers) / len(numbers) for name in criteria)
        # Rounded, so that equal shares summed in another order are equal.
        return [round(-sign(name) * mean, 9) for name, mean in zip(criteria, means, strict=True)]

    return min(settings, key=key)


def bootstrap(rows: Sequence[Sequence[float]], seed: int) -> list[Mean]:
    """Percentile bootstrap (B. Efron, Annals of Statistics 1979) of the mean of each row.

    Rows are of equal lengths and are resampled alike: entry ``i`` of each is the same example.
    """
    values = np.asarray(rows, dtype=np.float64)
    count = values.shape[1]
    # torch's draws and not scipy's: the figures of profiles that users keep are from these.
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(count, (RESAMPLES, count), generator=generator).numpy()
    found = []
    for row in values:
        low, high = np.percentile(row[drawn].mean(axis=1), (2.5, 97.5))
        found.append(Mean(float(row.mean()), float(low), float(high)))
    return found


def verdict(best: Method, default: Method, held_out: Sequence[Comparison]) -> tuple[bool, str]:
    """Whether the choice replaces the default, and a sentence that says why.

    The first criterion decides; where it says neither way, the next one may.
    """
    shown = "; ".join(
        f"{one.figure} {one.chosen.value:.4g} against {one.default.value:.4g}, 95% interval of the "
        f"gain {one.difference.low:.2g} to {one.difference.high:.2g}"
        for one in held_out
    )
    if best == default:
        return False, f"The default {label(default)} is the best of all settings ({shown})."
    for one in held_out:
        if one.better:
            return True, (
                f"{label(best)} beats the default {label(default)} on held-out examples by its "
                f"{one.figure} ({shown})."
            )
        if one.difference.value < 0:
            break
    return False, (
        f"No setting beats the default {label(default)} on held-out examples beyond the noise, "
        f"so it stays: best on all examples is {label(best)}; {shown}."
    )
