"""The table of methods: answers are those of greedy generation, and runs go on."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks import quality, quality_tables
from benchmarks.answering import Answerer
from rag_windows import Passage, WindowedLM
from rag_windows.calibration.compare import GRIDS
from training.tasks import draw_case

MODEL = "tiny-reader"


def test_methods_are_judged_and_a_run_goes_on_where_it_stopped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results, figures = tmp_path / "results.jsonl", tmp_path / "figures.json"
    wanted = ["--questions", "4", "--passages", "8", "--jobs", "1", "--results", str(results)]
    some = [*wanted, "--tasks", "single", "--methods", "sequential", "pcw"]
    quality.main([*some, "--json", str(figures)])
    printed = capsys.readouterr().out
    assert printed.count("| pcw ") == 3
    assert re.search(r"\| pcw +\| 100.0 \(100.0–100.0\) +\|", printed)
    assert re.search(r"\| pcw +\| \d+.0 .*\| 0% +\| yes", printed)
    assert re.search(r"\| sequential +\| \d+.0 .*\| 100% +\| no", printed)
    assert "4 questions a cell. 4 of 4 answers that were written" in printed
    made = json.loads(figures.read_text(encoding="utf-8"))
    assert [one["label"] for one in made] == ["sequential", "pcw"]
    assert made[1]["retention"] == [100.0, 100.0, 100.0]
    before = results.read_text(encoding="utf-8")
    # A line that was torn off is done again, everything else is there.
    results.write_text(before[:-30], encoding="utf-8")
    quality.main(some)
    assert len(quality.Kept(results).blocks) == 2
    assert results.read_text(encoding="utf-8") == before
    quality.main([*wanted, "--tasks", "kin", "--model", MODEL, "--methods", "pcw"])
    assert "### kin, `tiny-reader`" in capsys.readouterr().out
    lines = results.read_text(encoding="utf-8")
    for jobs in ("1", "2"):
        quality.main([*some, "--questions", "5", "--minutes", "0", "--jobs", jobs])
        assert "4 questions a cell." in capsys.readouterr().out
        assert results.read_text(encoding="utf-8") == lines
    quality.main([*some, "--minutes", "0", "--base", "pcw"])
    printed = capsys.readouterr().out
    assert "### Of the right answers of pcw, 8 passages" in printed
    assert re.search(r"\| pcw +\| \d+.0 \(\d", printed)
    assert re.search(r"\| sequential +\| 100.0 \(100.0–100.0\)", printed)


def test_more_questions_are_more_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quality, "BLOCK", 2)
    results = tmp_path / "results.jsonl"
    place = (MODEL, "single", 2)
    some = ["--tasks", "single", "--passages", "2", "--methods", "pcw", "--jobs", "1"]
    some += ["--results", str(results)]
    quality.main([*some, "--questions", "3"])
    quality.main([*some, "--questions", "5"])
    kept = quality.Kept(results)
    (own,) = kept.blocks.values()
    assert [len(own[block]["right"]) for block in range(3)] == [2, 2, 1]
    assert [one["block"] for _, one in sorted(own.items())] == [0, 1, 2]
    assert [len(one.right) for one in kept.cells([(place, "pcw")], 4)] == [4]
    assert len(results.read_text(encoding="utf-8").splitlines()) == 4


@pytest.mark.parametrize("task", ["single", "split documents"])
def test_answers_are_right_exactly_where_greedy_generation_is(task: str) -> None:
    labels = tuple(one for one, row in quality.ROWS.items() if task in (row.tasks or (task,)))
    # Of these all are written token by token; on the second task the reader is often wrong.
    job = quality.Job((MODEL, task, 4), 1, 3, 3, labels, {})
    lines = quality.ask(job)
    assert {one["label"] for one in lines} == set(labels)
    assert {one["written"] for one in lines} == {"111"}
    assert len({one["right"] for one in lines}) > 1
    assert quality.ask(job) == lines


def test_what_could_still_become_the_answer_is_generated(monkeypatch: pytest.MonkeyPatch) -> None:
    lm = WindowedLM.from_pretrained(MODEL)
    case = draw_case(np.random.default_rng(5), "single", 2)
    asked = case.messages, quality.scored(case)
    methods = [quality.method_of(one, 2) for one in ("sequential", "pcw")]
    prompt = lm.engine.text.prompt
    assert Answerer(lm).right(asked, case.answer, methods) == [True, True]
    assert Answerer(lm).right(asked, case.answer + "x", methods) == [False, False]
    assert Answerer(lm).right(asked, case.answer[:-1], methods) == [False, False]
    # The same text from other tokens, of which the model would write none.
    letters = [prompt.encode_text(one, continuation=True) for one in case.answer]
    ids = [token for one in letters for token in one]
    monkeypatch.setattr(prompt, "encode_text", lambda *_, **__: ids)
    assert Answerer(lm).right(asked, case.answer, methods) == [True, True]


def test_citations_name_the_stating_passage() -> None:
    (one,) = quality.ask(quality.Job((MODEL, "single", 4), 0, 5, 5, ("ape",), {}))
    assert one["right"].count("1") >= 4
    assert one["cited"].count("1") >= one["right"].count("1") - 1
    assert 0 < one["blind"] < 1
    assert (one["again"], one["cached"]) == (0.0, True)


def test_extra_prefill_is_what_a_second_question_has_to_encode() -> None:
    asking = quality.answerer(MODEL, "title")
    case = draw_case(np.random.default_rng(3), "single", 4)
    asked = case.messages, quality.scored(case)
    found = {one: asking.again(asked, quality.method_of(one, 4)) for one in quality.ROWS}
    assert found["sequential"] == (1.0, False)
    assert found["mateicl"] == found["codebook, 8 by mean"] == (0.0, True)
    # Where a window stands depends on the longest one, or on those before it.
    assert found["structured-prompting"] == (0.0, False)
    assert 0.1 < found["linked 15%, first"][0] < 0.2
    assert not found["linked 15%, first"][1]
    assert 0.1 < found["linked 15%, query"][0] < 0.2
    assert found["neighbours"] == found["sink"] == (0.0, True)


def test_a_row_is_calibrated_on_questions_that_are_not_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quality, "CALIBRATION", 8)
    monkeypatch.setitem(GRIDS, "ape", {"scale": (0.9, 1.0)})
    place = (MODEL, "many alike", 2)
    asked, others = (
        {text for one in quality.cases(place, 0, 50, seed) for _, text in one.passages}
        for seed in (1, 2)
    )
    assert not asked & others
    results = tmp_path / "results.jsonl"
    some = ["--tasks", "many alike", "--passages", "2", "--methods", "ape, calibrated"]
    some += ["--model", MODEL]
    quality.main([*some, "--questions", "2", "--jobs", "1", "--results", str(results)])
    kept = quality.Kept(results)
    assert kept.chosen[place]["ape, calibrated"]["name"] == "ape"
    assert [one.right for one in kept.cells([(place, "ape, calibrated")], 2)]


def test_every_row_is_a_method_and_names_a_header() -> None:
    for label, row in quality.ROWS.items():
        assert quality.method_of(label, 2).name in row.method
        asking = quality.answerer(MODEL, row.header)
        assert asking.lm.model is quality.loaded(MODEL).model


def test_chunks_of_a_document_have_their_places_and_neighbours() -> None:
    case = draw_case(np.random.default_rng(1), "split documents", 4)
    made = quality.scored(case)
    assert [one.title for one in made] == [title for title, _ in case.passages]
    for number, one in enumerate(made):
        same = [i for i in range(number) if case.documents[i] == case.documents[number]]
        assert one.index == len(same)
        assert one.before == tuple(case.passages[i][1] for i in same)
        assert one.document == case.passages[(*same, number)[0]][0]
    plain = replace(case, documents=())
    assert quality.scored(plain)[0] == Passage(
        plain.passages[0][1],
        title=plain.passages[0][0],
        id="0",
        score=quality.scored(plain)[0].score,
    )


def test_shares_have_the_textbook_interval_and_retention_is_paired() -> None:
    marks = "1" * 300 + "0" * 100
    found = quality_tables.estimated(marks)
    half = 196 * np.sqrt(0.75 * 0.25 / 400)
    assert found.value == 75
    assert (found.low, found.high) == pytest.approx((75 - half, 75 + half), abs=0.8)
    assert quality_tables.percent(marks, marks) == "100.0 (100.0–100.0)"
    assert quality_tables.arrow(marks, "0" * 400) == " ↑"
    # Of differences in 40 of 400 pairs, 30 of them losses.
    other = "1" * 270 + "0" * 30 + "1" * 10 + "0" * 90
    lost = quality_tables.estimated(other, marks, quality_tables.difference)
    half = 1.96 * np.sqrt((40 / 400 - (20 / 400) ** 2) / 400) * 100
    assert lost.value == -5
    assert (lost.low, lost.high) == pytest.approx((-5 - half, -5 + half), abs=0.5)
    assert quality_tables.arrow(other, marks) == " ↓"
