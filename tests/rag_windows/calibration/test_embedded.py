"""Calibration of the embedded reader, on questions that it answers."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from rag_windows import APE, Passage, WindowedLM
from rag_windows.calibration import Example, Profile, ape_grid
from rag_windows.calibration.choosing import compare
from rag_windows.calibration.contexts import Contexts
from rag_windows.calibration.measuring import Measuring
from rag_windows.calibration.prepared import prepare
from rag_windows.methods import Method
from training.tasks import draw_case

GRID = ape_grid((0.7, 0.9), (0.6, 0.9))


def questions(count: int, seed: int) -> list[Example]:
    rng = np.random.default_rng(seed)
    cases = [draw_case(rng, "single", 6) for _ in range(count)]
    return [
        Example(
            list(case.messages),
            [Passage(text, title=title) for title, text in case.passages],
            case.answer,
        )
        for case in cases
    ]


@pytest.fixture(scope="module")
def lm() -> WindowedLM:
    return WindowedLM.from_pretrained("tiny-reader")


@pytest.fixture(scope="module")
def bad_default(lm: WindowedLM) -> Profile:
    return lm.calibrate(questions(12, seed=1), method=APE(0.9, 0.6), settings=GRID)


@pytest.fixture(scope="module")
def good_default(lm: WindowedLM) -> Profile:
    return lm.calibrate(questions(12, seed=1), by="agreement", settings=GRID, refine=False)


def held_out(lm: WindowedLM, settings: list[Method]) -> dict[str, list[list[float]]]:
    """Figure -> one row of values a setting, on questions that chose nothing."""
    ready, _ = prepare(
        lm.engine,
        questions(16, seed=2),
        settings,
        prefix=None,
        max_new_tokens=8,
        need_reference=True,
        on_progress=lambda *_: None,
    )
    measuring = Measuring(
        lm.engine,
        ready,
        Contexts(lm.engine),
        metric=None,
        max_new_tokens=8,
        on_progress=lambda *_: None,
    )
    measuring.run(settings, "")
    return {
        figure: [list(rows[one].values()) for one in settings]
        for figure, rows in measuring.table.items()
    }


def test_a_default_that_does_not_suit_is_beaten(bad_default: Profile) -> None:
    assert bad_default.beats_default
    assert bad_default.method == bad_default.best != APE(0.9, 0.6)
    assert bad_default.held_out[0].better
    assert "beats the default ape(temperature=0.9, scale=0.6)" in bad_default.verdict
    row = bad_default.setting(bad_default.method)
    assert row.figures["exact match"].value > 0.8


def test_a_default_that_suits_stays_or_is_beaten_beyond_the_noise(good_default: Profile) -> None:
    (comparison,) = good_default.held_out
    assert good_default.beats_default == (
        comparison.better and good_default.best != good_default.default
    )
    if not good_default.beats_default:
        assert good_default.method == APE()
    worst = good_default.setting(APE(0.9, 0.6)).figures["divergence"]
    assert worst.low > good_default.setting(good_default.method).figures["divergence"].high


def test_the_choice_is_never_worse_than_the_default_on_new_questions(
    lm: WindowedLM, bad_default: Profile, good_default: Profile
) -> None:
    defaults = [bad_default.default, good_default.default]
    figures = held_out(lm, [*defaults, bad_default.method, good_default.method])
    for figure in ("exact match", "divergence", "log-probability"):
        bad, good, instead, kept = figures[figure]
        assert compare(figure, instead, bad, seed=0).better
        assert not compare(figure, kept, good, seed=0).worse


def test_an_answer_that_only_begins_right_is_no_exact_match(lm: WindowedLM) -> None:
    of_two = [one for one in questions(60, seed=1) if one.answer and " " in one.answer][:8]
    cut = [dataclasses.replace(one, answer=str(one.answer).split()[0]) for one in of_two]
    whole, begun = (
        lm.calibrate(some, settings=[APE()], refine=False).setting(APE()).figures["exact match"]
        for some in (of_two, cut)
    )
    assert whole.value > 0.8
    assert begun.value == 0


def test_one_pass_finds_the_exact_matches_of_generation(
    lm: WindowedLM, bad_default: Profile
) -> None:
    given = questions(12, seed=1)
    for method in (bad_default.default, bad_default.method):
        right = [
            lm.generate(
                one.query,
                one.passages,
                method=method,
                max_new_tokens=12,
                do_sample=False,
                citations=False,
            ).text.strip()
            == one.answer
            for one in given
        ]
        assert bad_default.setting(method).figures["exact match"].value == np.mean(right)
