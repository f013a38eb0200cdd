"""Marks of logarithmic axes: at the values themselves, as far as their labels have room."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

_LEAST = 6.0
"""How many times the shortest time the longest is on an axis at least: two marks or more."""

_CHARACTER = 8.5
"""Width of a digit of an axis in CSS pixels, generously."""


def logarithmic(
    axis: Any,
    values: Sequence[float],
    pixels: float,
    *,
    base: int = 10,
    marks: Sequence[float] | None = None,
) -> None:
    """Mark an axis at some of the values, or of other numbers.

    Args:
        axis: matplotlib's, of x.
        values: that are drawn, all above zero.
        pixels: length of the axis.
        base: of the logarithm.
        marks: where it is marked as far as there is room; None for the values.
    """
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    _scale(axis, base)
    low, high = math.log(min(values)), math.log(max(values))
    room = 0.06 * (high - low) or 0.2
    axis.axes.set_xlim(math.exp(low - room), math.exp(high + room))
    axis.set_major_locator(FixedLocator(_apart(sorted(set(marks or values)), pixels)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: plain(value)))


def seconds(axis: Any, values: Sequence[float]) -> None:
    """Mark an axis of y at 1, 2 and 5 of each power of ten; at the powers where it is long."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    _scale(axis, 10)
    room = max(1.25, (_LEAST / (max(values) / min(values))) ** 0.5)
    low, high = min(values) / room, max(values) * room
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = (1, 2, 5) if len(powers) <= 4 else (1,)
    marks = [step * 10.0**power for power in powers for step in steps]
    inside = [mark for mark in marks if low <= mark <= high]
    axis.axes.set_ylim(low, high)
    axis.set_major_locator(FixedLocator(inside))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: _time(value)))


def plain(value: float) -> str:
    """Such as 12, 1.5 or 12,000."""
    return f"{value:,.0f}" if abs(value - round(value)) < 1e-6 or value >= 100 else f"{value:.1f}"


def _time(value: float) -> str:
    if value >= 1:
        return f"{value:g} s"
    return f"{1000 * value:g} ms" if value >= 0.001 else f"{1e6 * value:g} µs"


def _scale(axis: Any, base: int) -> None:
    set_scale = axis.axes.set_xscale if axis.axis_name == "x" else axis.axes.set_yscale
    set_scale("log", base=base)


def _apart(values: Sequence[float], pixels: float) -> list[float]:
    """Those whose labels don't meet; the first and the last always."""
    low, high = math.log(values[0]), math.log(values[-1])
    if high <= low:
        return [values[0]]

    def place(value: float) -> float:
        return (math.log(value) - low) / (high - low) * pixels

    def clear(one: float, other: float) -> bool:
        half = _CHARACTER * (len(plain(one)) + len(plain(other))) / 2
        return abs(place(one) - place(other)) >= half + 8

    kept = [values[0]]
    for value in values[1:-1]:
        if clear(kept[-1], value) and clear(value, values[-1]):
            kept.append(value)
    return [*kept, values[-1]] if clear(kept[-1], values[-1]) else kept
