"""Shares, differences and ratios with intervals from contexts drawn again."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.judgement.estimates import Answers, difference, ratio, retention, share


def test_share_of_independent_answers_has_the_textbook_interval() -> None:
    marks = ["1"] * 300 + ["0"] * 100
    found = share(Answers.of(marks))
    half = 1.96 * np.sqrt(0.75 * 0.25 / 400)
    assert found.value == 0.75
    assert found.low == pytest.approx(0.75 - half, abs=0.006)
    assert found.high == pytest.approx(0.75 + half, abs=0.006)


def test_answers_that_go_together_widen_the_interval() -> None:
    alone = share(Answers.of(["1", "0"] * 200))
    together = share(Answers.of(["11111111", "00000000"] * 25))
    assert alone.value == together.value == 0.5
    assert together.high - together.low > 2.5 * (alone.high - alone.low)


def test_contexts_count_by_their_questions() -> None:
    assert share(Answers.of(["1111", "0"])).value == 0.8


def test_differences_are_paired() -> None:
    rng = np.random.default_rng(0)
    hard = ["".join("01"[int(x)] for x in rng.random(8) < 0.5) for _ in range(100)]
    better = [mark.replace("0", "1", 1) for mark in hard]
    gain = difference(Answers.of(better), Answers.of(hard))
    assert gain.value == pytest.approx(1 / 8, abs=0.005)
    # Unpaired, two shares of 800 answers would differ by 4 points either way.
    assert gain.low > 0.11
    nothing = difference(Answers.of(hard), Answers.of(hard))
    assert (nothing.value, nothing.low, nothing.high) == (0.0, 0.0, 0.0)


def test_retention_and_ratio() -> None:
    base, own = Answers.of(["1110"] * 50), Answers.of(["1100"] * 50)
    kept = retention(own, base)
    assert kept is not None
    assert kept.value == pytest.approx(2 / 3)
    between = ratio(Answers.of(["10"] * 40), base)
    assert between is not None
    assert between.value == pytest.approx(2 / 3)
    nothing = Answers.of(["00"] * 40)
    assert retention(own, Answers.of(["0000"] * 50)) is None
    assert ratio(own, nothing) is None


def test_the_figures_of_the_first_judgement_stand() -> None:
    # Written down before the draws moved to rag_windows.evaluation.statistics: the committed tables
    # were made with them.
    own = [
        "".join("01"[(3 * i * i + 5 * j + i) % 7 < 4] for j in range(1 + i % 5)) for i in range(40)
    ]
    base = ["".join("01"[(2 * i * i + 3 * j) % 5 < 3] for j in range(1 + i % 5)) for i in range(40)]
    other = ["".join("01"[(i * j + i) % 3 != 0] for j in range(4)) for i in range(25)]
    answers, bases, others = Answers.of(own), Answers.of(base), Answers.of(other)
    kept, between = retention(answers, bases), ratio(answers, others)
    assert kept is not None
    assert between is not None
    found = [
        (x.value, x.low, x.high)
        for x in (share(answers), difference(answers, bases), kept, between)
    ]
    np.testing.assert_allclose(
        found,
        [
            (0.6833333333333333, 0.640625, 0.729513735046522),
            (0.08333333333333333, 0.017237695254936635, 0.1438862546326575),
            (1.1388888888888888, 1.0266666666666666, 1.254300274851122),
            (1.423611111111111, 1.1064986876195002, 2.0377694345216386),
        ],
        rtol=1e-12,
    )
