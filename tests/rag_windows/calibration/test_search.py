"""The search on made figures: folds, ties, finer rounds, and intervals."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from rag_windows import APE, PCW, Auto, DeepThinking, InputError, MateICL, Method, Sequential
from rag_windows.calibration import Comparison, Cost, Mean, compare

GRID = compare.ape_grid((0.5, 0.7, 0.9), (0.5, 0.7, 0.9))
DEFAULT = APE(0.9, 0.9)


def searched(table: Any, criteria: Sequence[Any] = ("divergence",), **options: Any) -> Any:
    """The search over `GRID`; a table, or what measures settings into one."""
    measure = table if callable(table) else lambda _: table
    options = {"refine": True, "seed": 0, **options}
    return compare.search(GRID, DEFAULT, criteria, measure, **options)


def around(place: tuple[float, float], noise: float) -> Any:
    """Divergences with their minimum at a place, and noise of each example and setting."""
    table: dict[str, Any] = {"divergence": {}}

    def measure(settings: Sequence[Any]) -> Any:
        for one in settings:
            off = abs(one.temperature - place[0]) + abs(one.scale - place[1])
            rng = random.Random(repr(one))
            table["divergence"][one] = [off + noise * rng.random() for _ in range(24)]
        return table

    return measure


def test_a_better_setting_is_found_between_the_coarse_ones() -> None:
    choice = searched(around((0.6, 0.7), noise=0.01))
    assert choice.best == APE(0.592, 0.7)
    assert choice.best in choice.fine
    (held_out,) = choice.held_out
    assert held_out.better
    assert held_out.chosen.value < held_out.base.value
    assert held_out.difference.value == pytest.approx(0.5, abs=0.02)
    costs = {choice.best: Cost(2.0, 0.5), DEFAULT: Cost(2.0, 2.0)}
    taken, sentence = compare.verdict(choice.best, DEFAULT, choice.held_out, costs, 24)
    assert taken == choice.best
    assert "it was best on all 24 questions. As a check, methods were chosen on three" in sentence
    assert "includes 0" not in sentence
    assert sentence.endswith("Over encoded passages its first token comes 4.0x as soon.")
    assert searched(around((0.6, 0.7), noise=0.01), refine=False).best in GRID


@pytest.mark.parametrize("seed", range(3))
def test_noise_alone_does_not_beat_the_base(seed: int) -> None:
    choice = searched(around((0.9, 0.9), noise=20.0), seed=seed)
    assert choice.best != DEFAULT  # the luckiest of many
    costs = dict.fromkeys((choice.best, DEFAULT), Cost())
    taken, sentence = compare.verdict(choice.best, DEFAULT, choice.held_out, costs, 24)
    worse = choice.held_out[0].difference.value < 0
    assert taken == (DEFAULT if worse else choice.best)
    assert ("a check does not confirm it" in sentence) == worse
    assert "may be chance, and 24 questions are too few to decide" in sentence


def compared(figure: Any, chosen: float, base: float, low: float, high: float) -> Comparison:
    middle = chosen - base
    means = (Mean(chosen, chosen, chosen), Mean(base, base, base), Mean(middle, low, high))
    return Comparison(figure, *means)


LIKELIER = compared("log-probability", -1.2, -1.9, 0.29, 1.1)


@pytest.mark.parametrize(
    ("best", "held_out", "says"),
    [
        (
            Sequential(),
            [compared("contains", 0.75, 0.75, 0.0, 0.0), LIKELIER],
            "Take one prompt: no other method was better on these 12 questions (75% right "
            "answers). Methods with as many right answers had no higher log-probability of the "
            "right answer.",
        ),
        (
            Auto(),
            [compared("contains", 0.75, 10 / 12, -0.25, 1 / 12), LIKELIER],
            "Take one prompt: auto was best on all 12 questions, but a check does not confirm it. "
            "As a check, methods were chosen on three quarters of the questions and judged on the "
            "rest: they had 75% right answers, one prompt 83.3% (gain -8.33 points, 95% interval "
            "-25 to 8.33). The interval includes 0: the difference may be chance, and 12 questions "
            "are too few to decide.",
        ),
        (
            Auto(),
            [compared("contains", 1.0, 0.5, 0.25, 0.75), LIKELIER],
            "Take auto: it was best on all 12 questions. As a check, methods were chosen on three "
            "quarters of the questions and judged on the rest: they had 100% right answers, one "
            "prompt 50% (gain 50 points, 95% interval 25 to 75).",
        ),
        (
            Auto(),
            [compared("contains", 0.75, 0.75, -0.1, 0.1), LIKELIER],
            "Take auto: it was best on all 12 questions. As a check, methods were chosen on three "
            "quarters of the questions and judged on the rest: they had as many right answers as "
            "one prompt, so the log-probability of the right answer decides, -1.2, one prompt -1.9 "
            "(nearer 0 is better; gain 0.7, 95% interval 0.29 to 1.1).",
        ),
    ],
)
def test_the_verdict_says_what_was_compared_and_what_decided(
    best: Method, held_out: list[Comparison], says: str
) -> None:
    base = Sequential()

    def said(seconds: float) -> str:
        costs = {base: Cost(2.0, 2.0), Auto(): Cost(2.0, seconds)}
        return compare.verdict(best, base, held_out, costs, 12, [base, Auto()])[1]

    assert said(2.0) == said(1.97) == says  # no word of a first token that comes 1.0x as soon
    sooner = said(0.5).removeprefix(says)
    assert sooner.endswith("ver encoded passages its first token comes 4.0x as soon.")
    assert sooner.startswith(" Over" if says.startswith("Take auto") else " If time counts, auto")


@pytest.mark.parametrize("seed", range(6))
def test_the_best_is_the_first_of_all_that_was_tried(seed: int) -> None:
    seen: dict[Any, list[float]] = {}
    measured = around((0.6, 0.7), noise=2.0)

    def measure(settings: Sequence[Any]) -> Any:
        table = measured(settings)
        seen.update(table["divergence"])
        return table

    choice = searched(measure, seed=seed)
    # Folds may try finer settings that the whole set did not.
    assert choice.best == min(seen, key=lambda one: sum(seen[one]))


def test_folds_never_judge_what_they_chose() -> None:
    # Every example but the last loves 0.5/0.5, which the last one makes the worst on average: only
    # the fold that holds the last one is judged by it.
    table: dict[str, Any] = {"divergence": {one: [1.0] * 8 for one in GRID}}
    table["divergence"][APE(0.5, 0.5)] = [0.0] * 7 + [9.0]
    choice = searched(table, refine=False, seed=1)
    assert choice.held_out[0].chosen.value == pytest.approx((6 * 1.0 + 0.0 + 9.0) / 8)


def test_the_later_criterion_decides_between_equals_only() -> None:
    scores = dict.fromkeys(GRID, (0.0, 0.0, 0.0))
    scores |= {GRID[0]: (1.0, 0.0, -2.0), GRID[1]: (0.0, 1.0, -1.0)}
    table = {
        "contains": {one: [a, b] for one, (a, b, _) in scores.items()},
        "log-probability": {one: [c, c] for one, (_, _, c) in scores.items()},
    }
    decided = searched(table, ("contains", "log-probability"), refine=False)
    assert decided.best == GRID[1]
    assert searched(table, ("contains",), refine=False).best == GRID[0]


def test_methods_are_tried_over_grids_of_their_numbers() -> None:
    grid = compare.default_grid(APE(form="fixed ratio"))
    assert len(set(grid)) == len(grid) == len(compare.VALUES) ** 2
    assert {one.form for one in grid if isinstance(one, APE)} == {"fixed ratio"}
    assert set(compare.ape_grid()) == set(compare.default_grid(APE(0.2, 0.3)))
    deep = compare.default_grid(DeepThinking(momentum=0.5, reader=APE(0.8, 0.7)))
    assert {getattr(one, "reader", None) for one in deep} == {APE(0.8, 0.7)}
    assert {MateICL(), MateICL(2.0)} <= set(compare.default_grid(MateICL()))
    with pytest.raises(InputError, match="'pcw' has no numbers to choose"):
        compare.default_grid(PCW())


def test_a_finer_grid_lies_between_the_best_and_its_neighbours() -> None:
    grid = compare.ape_grid((0.4, 0.9, 1.0), (0.4, 0.9, 1.0))
    inside = compare.finer(APE(0.9, 0.9), grid)
    assert len(inside) == 8
    assert APE(0.6, 0.949) in inside
    assert not set(inside) & set(grid)
    assert compare.finer(APE(1.0, 0.4), grid) == [APE(0.949, 0.4), APE(0.949, 0.6), APE(1.0, 0.6)]
    # Whole numbers stay whole, and words are no numbers.
    deep: list[Method] = [DeepThinking(steps=steps) for steps in (1, 2, 5)]
    assert compare.finer(deep[2], deep) == [DeepThinking(steps=3)]
    assert compare.finer(deep[0], deep) == []
    mateicl = compare.default_grid(MateICL())
    assert compare.finer(MateICL(), mateicl) == []
    assert compare.finer(MateICL(2.0), mateicl) == [MateICL(1.73), MateICL(2.45)]


def test_the_figures_of_the_first_profiles_stand() -> None:
    # Written down when torch computed all of it: profiles that users keep were made with these.
    rows = [
        [((7 * i * i + 3 * i) % 31) / 31 - 0.4 for i in range(50)],
        [float((i * i) % 3 == 1) for i in range(50)],
        [((5 * i) % 17) ** 2 / 10 for i in range(50)],
    ]
    means = compare.bootstrap(rows, seed=11)
    found = [value for one in means for value in (one.value, one.low, one.high)]
    wanted = [0.015483870967741906, -0.06000000000000002, 0.0858064516129032]
    wanted += [0.66, 0.52, 0.78, 8.687999999999999, 6.446000000000001, 10.906299999999998]
    assert found == pytest.approx(wanted, rel=1e-12)
