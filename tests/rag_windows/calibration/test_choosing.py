from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from rag_windows import APE
from rag_windows.calibration.choosing import beats, best_of, compare, deal, search, verdict
from rag_windows.calibration.grid import ape_grid
from rag_windows.calibration.measuring import Table
from rag_windows.methods import Method
from rag_windows.methods.registry import numbers_of

GRID = ape_grid((0.5, 0.7, 0.9), (0.5, 0.7, 0.9))
DEFAULT = APE(0.9, 0.9)


class Measure:
    """Divergences with their minimum at a place, and noise of each example and setting."""

    def __init__(self, place: tuple[float, float], noise: float, examples: int = 24) -> None:
        self.place, self.noise, self.examples = place, noise, examples
        self.table: Table = {"divergence": {}}

    def __call__(self, settings: Sequence[Method]) -> Table:
        for method in settings:
            numbers = numbers_of(method)
            off = abs(numbers["temperature"] - self.place[0]) + abs(
                numbers["scale"] - self.place[1]
            )
            rng = random.Random(repr(method))
            self.table["divergence"][method] = {
                n: off + self.noise * rng.random() for n in range(self.examples)
            }
        return self.table


def test_a_better_setting_is_found_between_the_coarse_ones() -> None:
    measure = Measure((0.6, 0.7), noise=0.01)
    numbers = range(measure.examples)
    choice = search(GRID, DEFAULT, numbers, ["divergence"], measure, refine=True, seed=0)
    assert choice.best == APE(0.592, 0.7)
    assert choice.best in choice.fine
    (held_out,) = choice.held_out
    assert held_out.better
    assert held_out.chosen.value < held_out.default.value
    assert held_out.difference.value == pytest.approx(0.5, abs=0.02)
    assert verdict(choice.best, DEFAULT, choice.held_out)[0]
    coarse = search(GRID, DEFAULT, numbers, ["divergence"], measure, refine=False, seed=0)
    assert coarse.best in GRID
    assert coarse.fine == ()


@pytest.mark.parametrize("seed", range(5))
def test_noise_alone_does_not_beat_the_default(seed: int) -> None:
    measure = Measure((0.9, 0.9), noise=20.0)
    numbers = range(measure.examples)
    choice = search(GRID, DEFAULT, numbers, ["divergence"], measure, refine=True, seed=seed)
    assert choice.best != DEFAULT  # the luckiest of many
    replaced, sentence = verdict(choice.best, DEFAULT, choice.held_out)
    assert not replaced
    assert sentence.startswith("No setting beats the default ape(temperature=0.9, scale=0.9)")


def test_the_default_may_be_the_best() -> None:
    measure = Measure((0.9, 0.9), noise=0.0)
    choice = search(GRID, DEFAULT, range(9), ["divergence"], measure, refine=True, seed=0)
    assert choice.best == DEFAULT
    assert verdict(choice.best, DEFAULT, choice.held_out)[1].startswith("The default")


def test_folds_never_judge_what_they_chose() -> None:
    # Every example but the last loves 0.5/0.5, which the last one makes the worst on average.
    table: Table = {"divergence": {one: dict.fromkeys(range(8), 1.0) for one in GRID}}
    table["divergence"][APE(0.5, 0.5)] = {n: 0.0 if n < 7 else 9.0 for n in range(8)}
    choice = search(GRID, DEFAULT, range(8), ["divergence"], lambda _: table, refine=False, seed=1)
    folds = deal(range(8), 4, 1)
    expected = []
    for fold in folds:
        rest = [n for n in range(8) if n not in fold]
        chosen = best_of(GRID, table, rest, ["divergence"])
        expected += [table["divergence"][chosen][n] for n in fold]
    assert sorted(expected)[-1] == 9.0
    assert choice.held_out[0].chosen.value == pytest.approx(sum(expected) / 8)


def test_folds_hold_every_example_once_and_follow_the_seed() -> None:
    numbers = [3, 5, 6, 8, 9, 12, 13]
    folds = deal(numbers, 3, seed=1)
    assert sorted(n for fold in folds for n in fold) == numbers
    assert [len(fold) for fold in folds] == [3, 2, 2]
    assert deal(numbers, 3, seed=1) == folds != deal(numbers, 3, seed=2)


def test_the_later_criterion_decides_between_equals_only() -> None:
    a, b, c = GRID[:3]
    table: Table = {
        "exact match": {a: {0: 1.0, 1: 0.0}, b: {0: 0.0, 1: 1.0}, c: {0: 0.0, 1: 0.0}},
        "log-probability": {a: {0: -2.0, 1: -2.0}, b: {0: -1.0, 1: -1.0}, c: {0: 0.0, 1: 0.0}},
    }
    assert best_of([a, b, c], table, [0, 1], ["exact match", "log-probability"]) == b
    assert best_of([a, b, c], table, [0, 1], ["exact match"]) == a


def test_a_comparison_counts_gains_whichever_way_a_figure_points() -> None:
    low = compare("divergence", [0.1] * 4, [0.3] * 4, seed=0)
    high = compare("exact match", [1.0] * 4, [0.0] * 4, seed=0)
    assert (low.better, high.better) == (True, True)
    assert low.difference.low == pytest.approx(0.2)
    worse = compare("exact match", [0.0] * 4, [1.0] * 4, seed=0)
    assert (worse.better, worse.worse) == (False, True)
    same = compare("exact match", [1.0] * 4, [1.0] * 4, seed=0)
    assert (same.better, same.worse) == (False, False)
    assert beats([same, low]) is low
    assert beats([worse, low]) is None
    assert beats([high, low]) is high
