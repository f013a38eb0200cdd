"""What the guard is said to be worth, on outcomes that can be counted by hand."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from benchmarks import guard
from benchmarks.guarding.asking import Outcome
from benchmarks.guarding.cases import CASES, PER_CONTEXT, pairs, sentences
from benchmarks.guarding.choosing import (
    SIGNALS,
    above,
    choose,
    guarded,
    halves,
    parted,
    separation,
)
from rag_windows import Passage

SPREAD = SIGNALS["spread"]


def outcome(
    context: int, windows: bool, ordinary: bool, spread: float, *, few: bool = False
) -> Outcome:
    return Outcome(context, windows, ordinary, few, spread, spread / 2)


LOST = [outcome(n, False, True, 0.8 + n / 100) for n in range(4)]
KEPT = [outcome(n, True, True, 0.1 + n / 100) for n in range(4)]


def test_a_guard_s_work_is_counted() -> None:
    outcomes = [*LOST, *KEPT, outcome(4, True, False, 0.9), outcome(4, False, False, 0.95)]
    made = guarded(outcomes, above(SPREAD, 0.805))
    assert (made.windows, made.ordinary) == (0.5, 0.8)
    assert made.fell == 0.5
    assert made.rescued == pytest.approx(0.3)
    assert made.spoilt == pytest.approx(0.1)
    assert made.guarded == pytest.approx(0.7)
    assert made.gain.value == pytest.approx(0.2)
    assert made.at_random == pytest.approx(0.65)


def test_the_default_guard_asks_few_passages_alone() -> None:
    assert not outcome(0, True, True, 0.82).by_default
    assert outcome(0, True, True, 0.1, few=True).by_default
    assert Outcome(0, True, True, True, None, None).by_default
    assert not Outcome(0, True, True, False, None, None).by_default


def test_a_threshold_parts_what_is_lost_from_what_is_kept() -> None:
    threshold = choose([*KEPT, *LOST], SPREAD)
    assert threshold == pytest.approx((0.13 + 0.8) / 2)
    assert choose(LOST, SPREAD) == 0.0


def test_what_does_not_pay_is_left_alone() -> None:
    assert choose(KEPT, SPREAD) == math.inf
    # One in twenty is rescued: just the price, and no more than that.
    even = [outcome(n, True, True, 0.5) for n in range(19)] + [outcome(19, False, True, 0.5)]
    assert choose(even, SPREAD) == math.inf
    assert choose([*even, outcome(20, False, True, 0.5)], SPREAD) == 0.0
    # Falling back on what windows alone have right costs the answer.
    assert choose([*LOST, *(outcome(n, True, False, 0.9) for n in range(5))], SPREAD) == math.inf


def test_halves_share_no_context() -> None:
    choosing, testing = halves([*LOST, *KEPT])
    assert {one.context for one in choosing} == {0, 2}
    assert {one.context for one in testing} == {1, 3}


def test_separation_is_a_chance() -> None:
    lost, kept = parted([*LOST, *KEPT], SPREAD)
    assert separation(lost, kept) == 1.0
    assert separation(kept, lost) == 0.0
    assert separation(kept, kept) == 0.5
    assert separation(lost, np.array([])) is None


def test_cuts_lose_no_text() -> None:
    assert sentences(Passage("One. Two.", title="T")) == [Passage("One."), Passage("Two.")]
    assert pairs(Passage("a\nb\nc")) == [Passage("a\nb"), Passage("c")]


def test_cases_are_seeded_and_hold_what_they_say() -> None:
    assert len({case.label for case in CASES}) == len(CASES)
    for case in CASES:
        groups = list(case.groups(2, seed=1))
        assert groups == list(case.groups(2, seed=1))
        assert groups != list(case.groups(2, seed=2))
        assert [len(group.questions) for group in groups] == [PER_CONTEXT] * 2


def test_the_page_has_a_place_for_every_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "guard.md"
    page.write_text(guard.PAGE.read_text(encoding="utf-8"), encoding="utf-8")
    monkeypatch.setattr(guard, "PAGE", page)
    guard.main(["--contexts", "2", "--timed", "1", "--only", "classification, 2", "--write"])
    written = page.read_text(encoding="utf-8")
    assert "8 questions in 1 cases" in written
    tables = capsys.readouterr().out.strip().split("\n\n")
    assert len(tables) == 5
    assert all(one.strip() in written for one in tables)


def test_quick_run_agrees_with_generate(capsys: pytest.CaptureFixture[str]) -> None:
    labels = ["windows of at most 12", "4, ensemble", "codebook"]
    guard.main(["--quick", "--contexts", "3", "--timed", "1", "--only", *labels])
    printed = capsys.readouterr().out
    assert "36 questions" in printed
    assert "as judged here in 9 of 9" in printed
    rows = [line for line in printed.splitlines() if line.startswith("| single-hop, 4, ensemble |")]
    # By default all of these few passages are read in one prompt; their windows can't be measured.
    assert " | 100.0 | " in rows[0]
    assert len(rows) == 2
