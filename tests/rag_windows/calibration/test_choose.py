"""The search on made figures: folds, ties, finer rounds, intervals, and the guard's threshold."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest
import torch

from rag_windows import APE, METHODS, PCW, InputError
from rag_windows.calibration import Mean, ape_grid, default_grid
from rag_windows.calibration.choose import (
    best_of,
    bootstrap,
    compare,
    deal,
    multi_hop_threshold,
    search,
    verdict,
    winning,
)
from rag_windows.calibration.grid import VALUES, finer, varying
from rag_windows.calibration.measure import Table
from rag_windows.methods import DeepThinking, MateICL, Method
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
    expected = []
    for fold in deal(range(8), 4, 1):
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
    worse = compare("exact match", [0.0] * 4, [1.0] * 4, seed=0)
    same = compare("exact match", [1.0] * 4, [1.0] * 4, seed=0)
    told = [(one.better, one.worse) for one in (low, high, worse, same)]
    assert told == [(True, False), (True, False), (False, True), (False, False)]
    assert low.difference.low == pytest.approx(0.2)
    assert winning([same, low]) is low
    assert winning([worse, low]) is None
    assert winning([high, low]) is high


def test_ape_is_tried_at_every_pair_and_keeps_its_form() -> None:
    grid = default_grid(APE(form="fixed ratio"))
    assert len(set(grid)) == len(grid) == len(VALUES) ** 2
    assert {one.form for one in grid if isinstance(one, APE)} == {"fixed ratio"}
    assert set(ape_grid()) == set(default_grid(APE(0.2, 0.3)))
    assert varying(grid) == {"temperature": VALUES, "scale": VALUES}


def test_other_methods_have_grids_of_their_numbers() -> None:
    deep = default_grid(DeepThinking(momentum=0.5, reader=APE(0.8, 0.7)))
    assert varying(deep).keys() == {"steps", "eta"}
    assert all(isinstance(one, DeepThinking) and one.reader == APE(0.8, 0.7) for one in deep)
    assert {MateICL(), MateICL(2.0)} <= set(default_grid(MateICL()))
    with pytest.raises(InputError, match="'pcw' has no numbers to choose"):
        default_grid(PCW())


@pytest.mark.parametrize("name", sorted(METHODS))
def test_every_method_has_a_grid_with_no_surprises_or_says_that_it_has_none(name: str) -> None:
    method = METHODS[name]()
    try:
        grid = default_grid(method)
    except InputError:
        assert not numbers_of(method)
        return
    assert method in grid or name == "deep-thinking"
    assert all(type(one) is type(method) for one in grid)


def test_a_finer_grid_lies_between_the_best_and_its_neighbours() -> None:
    grid = ape_grid((0.4, 0.9, 1.0), (0.4, 0.9, 1.0))
    inside = finer(APE(0.9, 0.9), grid)
    assert len(inside) == 8
    assert APE(0.6, 0.949) in inside
    assert not set(inside) & set(grid)
    assert finer(APE(1.0, 0.4), grid) == [APE(0.949, 0.4), APE(0.949, 0.6), APE(1.0, 0.6)]
    # Whole numbers stay whole, and words are no numbers.
    deep = [DeepThinking(steps=steps) for steps in (1, 2, 5)]
    assert finer(deep[2], deep) == [DeepThinking(steps=3)]
    assert finer(deep[0], deep) == []
    mateicl = default_grid(MateICL())
    assert finer(MateICL(), mateicl) == []
    assert finer(MateICL(2.0), mateicl) == [MateICL(1.73), MateICL(2.45)]


def test_an_interval_is_that_of_the_normal_law_for_many_values() -> None:
    values = torch.randn(400, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    (mean,) = bootstrap([values.tolist()], seed=2)
    error = float(values.std()) / math.sqrt(400)
    assert mean.value == pytest.approx(float(values.mean()))
    assert mean.low == pytest.approx(mean.value - 1.96 * error, abs=0.15 * error)
    assert mean.high == pytest.approx(mean.value + 1.96 * error, abs=0.15 * error)


def test_rows_are_resampled_alike_and_the_seed_decides() -> None:
    row = [0.0, 1.0, 1.0, 0.0, 3.0]
    one, other = bootstrap([row, [value + 1 for value in row]], seed=1)
    assert [other.low, other.high] == pytest.approx([one.low + 1, one.high + 1])
    assert bootstrap([row], seed=1) == [one]
    assert bootstrap([row, [2.0] * 5], seed=7)[1] == Mean(2.0, 2.0, 2.0)
    assert bootstrap([], seed=1) == []


def test_the_figures_of_the_first_profiles_stand() -> None:
    # Written down when torch computed all of it: profiles that users keep were made with these.
    rows = [
        [((7 * i * i + 3 * i) % 31) / 31 - 0.4 for i in range(50)],
        [float((i * i) % 3 == 1) for i in range(50)],
        [((5 * i) % 17) ** 2 / 10 for i in range(50)],
    ]
    found = [value for one in bootstrap(rows, seed=11) for value in (one.value, one.low, one.high)]
    wanted = [0.015483870967741906, -0.06000000000000002, 0.0858064516129032]
    wanted += [0.66, 0.52, 0.78, 8.687999999999999, 6.446000000000001, 10.906299999999998]
    assert found == pytest.approx(wanted, rel=1e-12)


def test_the_guards_threshold_separates_where_it_can_and_tells_its_errors() -> None:
    apart = multi_hop_threshold([0.1, 0.2, 0.15, 0.05], [0.6, 0.9, 0.8, 0.7])
    assert apart is not None
    assert apart["threshold"] == pytest.approx(0.4)
    assert (apart["false_alarms"], apart["missed"]) == (0.0, 0.0)
    assert (apart["single_hop"], apart["multi_hop"]) == (4, 4)
    mixed = multi_hop_threshold([0.1, 0.2, 0.3, 0.85], [0.25, 0.7, 0.8, 0.9])
    assert mixed is not None
    assert 0.3 < mixed["threshold"] < 0.7
    assert (mixed["false_alarms"], mixed["missed"]) == (0.25, 0.25)
    assert multi_hop_threshold([0.1, 0.2, 0.1], [0.9] * 9) is None
