"""A threshold chosen on one half of the contexts, and what it does on the other."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.guarding.asking import Outcome
from benchmarks.judgement.estimates import Answers, difference
from rag_windows.evaluation.statistics.estimate import Estimate

PRICE = 0.05
"""Right answers that a fall-back has to bring to be worth its time: one in twenty corrects one."""

Signal = Callable[[Outcome], float | None]
SIGNALS: dict[str, Signal] = {
    "spread": lambda one: one.spread,
    "disagreement": lambda one: one.disagreement,
}


@dataclass(frozen=True, slots=True)
class Guarded:
    """What a guard did to some questions; all but the gain are shares of them.

    Attributes:
        windows: right with windows.
        ordinary: right from one prompt.
        guarded: right with the guard.
        gain: ``guarded`` minus ``windows``, with its interval.
        at_random: right if so many questions, whichever, had fallen back.
        fell: fell back.
        rescued: fell back, and only one prompt is right.
        spoilt: fell back, and only the windows were right.
    """

    windows: float
    ordinary: float
    guarded: float
    gain: Estimate
    at_random: float
    fell: float
    rescued: float
    spoilt: float


def halves(outcomes: Sequence[Outcome]) -> tuple[list[Outcome], list[Outcome]]:
    """Every other context to choose on, the rest to test on."""
    chosen = [one for one in outcomes if one.context % 2 == 0]
    return chosen, [one for one in outcomes if one.context % 2]


def choose(outcomes: Sequence[Outcome], signal: Signal) -> float:
    """The threshold above which falling back gains most, at `PRICE` for each time.

    Args:
        outcomes: at least one.
        signal: measured for all of them.

    Returns:
        In the middle between two measured values; 0 for nearly always, infinity for never, which
        also wins among equals.
    """
    values = _values(outcomes, signal)
    worth = np.array([one.ordinary - one.windows - PRICE for one in outcomes])
    order = np.argsort(values, kind="stable")
    sorted_values = values[order]
    # gained[k]: by the outcomes from the k-th on.
    gained = [*np.cumsum(worth[order][::-1])[::-1], 0.0]
    best, threshold = 0.0, math.inf
    for place in range(len(outcomes)):
        below = sorted_values[place - 1] if place else 0.0
        if below < sorted_values[place] and gained[place] > best + 1e-9:
            best, threshold = gained[place], float(below + sorted_values[place]) / 2
            threshold = threshold if place else 0.0
    return threshold


def guarded(outcomes: Sequence[Outcome], falls: Callable[[Outcome], bool]) -> Guarded:
    """What a guard that falls back on some of the questions does to all of them."""
    answers = [one.ordinary if falls(one) else one.windows for one in outcomes]
    count = len(outcomes)
    windows = sum(one.windows for one in outcomes) / count
    ordinary = sum(one.ordinary for one in outcomes) / count
    fallen = [one for one in outcomes if falls(one)]
    fell = len(fallen) / count
    plain = [one.windows for one in outcomes]
    return Guarded(
        windows=windows,
        ordinary=ordinary,
        guarded=sum(answers) / count,
        gain=difference(_by_context(outcomes, answers), _by_context(outcomes, plain)),
        at_random=windows + fell * (ordinary - windows),
        fell=fell,
        rescued=sum(one.ordinary and not one.windows for one in fallen) / count,
        spoilt=sum(one.windows and not one.ordinary for one in fallen) / count,
    )


def above(signal: Signal, threshold: float) -> Callable[[Outcome], bool]:
    """Whether a signal speaks."""

    def falls(one: Outcome) -> bool:
        value = signal(one)
        return value is not None and value > threshold

    return falls


def parted(outcomes: Sequence[Outcome], signal: Signal) -> tuple[np.ndarray, np.ndarray]:
    """Values of questions that windows lost to one prompt, and of all others."""
    values = _values(outcomes, signal)
    lost = np.array([one.ordinary and not one.windows for one in outcomes])
    return values[lost], values[~lost]


def separation(lost: np.ndarray, kept: np.ndarray) -> float | None:
    """Chance that a lost question has the higher value than another one; None without either."""
    if not len(lost) or not len(kept):
        return None
    higher = (lost[:, None] > kept[None, :]).mean()
    equal = (lost[:, None] == kept[None, :]).mean()
    return float(higher + equal / 2)


def _values(outcomes: Sequence[Outcome], signal: Signal) -> np.ndarray:
    return np.array([signal(one) for one in outcomes], dtype=np.float64)


def _by_context(outcomes: Sequence[Outcome], right: Sequence[bool]) -> Answers:
    marks: dict[int, str] = {}
    for one, mark in zip(outcomes, right, strict=True):
        marks[one.context] = marks.get(one.context, "") + str(int(mark))
    return Answers.of(list(marks.values()))
