"""Which settings are tried: a coarse grid first, then a finer one around its best."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from rag_windows.errors import InputError, MethodError
from rag_windows.methods import APE, Method
from rag_windows.methods.mateicl import SCHEDULES
from rag_windows.methods.registry import numbers_of, with_numbers, with_own

VALUES = (0.3, 0.5, 0.7, 0.8, 0.9, 1.0, 1.1)
"""Coarse values of APE's temperature and scale; the paper searches 0.1 to 1.0."""

WEIGHTS = (1.0, 1.5, 2.0, 3.0, 5.0, 8.0)
"""Values of MateICL's b beside its named schedules."""

GRIDS: Mapping[str, Mapping[str, tuple[float, ...]]] = {
    "ape": {"temperature": VALUES, "scale": VALUES},
    "deep-thinking": {"steps": (1, 2, 5, 10), "eta": (0.003, 0.01, 0.03, 0.1)},
}
"""Coarse values of methods that have a grid of their own."""


def ape_grid(
    temperatures: Iterable[float] = VALUES, scales: Iterable[float] = VALUES
) -> tuple[Method, ...]:
    """APE at every pair of temperature and scale."""
    column = tuple(scales)
    return tuple(
        APE(temperature=temperature, scale=scale)
        for temperature in temperatures
        for scale in column
    )


def default_grid(method: Method) -> tuple[Method, ...]:
    """The settings that are tried for a method where no grid is given.

    APE gets `ape_grid`, MateICL every named schedule and some numbers, Deep-Thinking steps and
    eta, which cost an encoding each. Of any other method each number in its fields is tried at its
    value times 1/4, 1/2, 1, 2 and 4 (whole numbers stay whole and at least 1), in all combinations.
    What a method refuses is left out; the numbers of a reader inside it stay as they are.

    Raises:
        InputError: the method has no numbers to choose.
    """
    if method.name == "mateicl":
        return tuple(with_own(method, {"schedule": b}) for b in (*SCHEDULES, *WEIGHTS))
    values = GRIDS.get(method.name)
    if values is None:
        # What the reader of a method does is the reader's own: calibrate that one first.
        own = {name: value for name, value in numbers_of(method).items() if "." not in name}
        values = {name: _around(value) for name, value in own.items()}
    if not values:
        raise InputError(
            f"The method {method.name!r} has no numbers to choose; calibrate one that has, such as "
            "'ape', or give settings= as a list of methods."
        )
    return tuple(combinations(method, values))


def combinations(method: Method, values: Mapping[str, Sequence[float]]) -> list[Method]:
    """The method at every combination of values that it takes."""
    settings: list[dict[str, float]] = [{}]
    for name, some in values.items():
        settings = [{**setting, name: value} for setting in settings for value in some]
    made = []
    for setting in settings:
        try:
            made.append(with_numbers(method, setting))
        except MethodError:
            continue
    return list(dict.fromkeys(made))


def varying(settings: Iterable[Method]) -> dict[str, tuple[float, ...]]:
    """Numeric fields in which settings of one kind differ: name -> sorted values."""
    values: dict[str, set[float]] = {}
    for setting in settings:
        for name, value in numbers_of(setting).items():
            values.setdefault(name, set()).add(value)
    return {name: tuple(sorted(some)) for name, some in values.items() if len(some) > 1}


def finer(best: Method, settings: Sequence[Method]) -> list[Method]:
    """Settings half-way between the best one and its neighbours in the grid, in every direction.

    Half-way is the geometric mean (the mean where a value is not positive), rounded to three
    digits; a whole number has neighbours half-way only where there is a whole number between. At
    the edge of the grid nothing lies beyond it.
    """
    kin = [one for one in settings if type(one) is type(best) and _same_but_numbers(one, best)]
    here = numbers_of(best)
    choices: dict[str, list[float]] = {}
    for name, values in varying(kin).items():
        if name not in here:  # a number in other settings, a word in this one
            continue
        place = values.index(here[name])
        between = {here[name]}
        for other in (place - 1, place + 1):
            if 0 <= other < len(values):
                between.add(_half_way(here[name], values[other]))
        choices[name] = sorted(between)
    known = set(settings)
    return [one for one in combinations(best, choices) if one not in known]


def _same_but_numbers(one: Method, other: Method) -> bool:
    try:
        return with_numbers(one, numbers_of(other)) == other
    except (MethodError, AttributeError, TypeError):
        return False


def _half_way(one: float, other: float) -> float:
    if isinstance(one, int) and isinstance(other, int):
        return (one + other) // 2
    if one > 0 and other > 0:
        return float(f"{math.sqrt(one * other):.3g}")
    return (one + other) / 2


def _around(value: float) -> tuple[float, ...]:
    if isinstance(value, int):
        return tuple(sorted({max(1, round(value * factor)) for factor in (0.25, 0.5, 1, 2, 4)}))
    return tuple(value * factor for factor in (0.25, 0.5, 1.0, 2.0, 4.0))
