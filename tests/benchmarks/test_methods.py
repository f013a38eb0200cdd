"""The judgement's command, and what its figures rest on."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import methods
from benchmarks.judgement import ensembles
from benchmarks.judgement.cases import TASKS, draw_groups
from benchmarks.judgement.entries import BASE, chosen, entries, shares_windows
from benchmarks.judgement.journal import JournalError
from benchmarks.judgement.page import PageError, fill_page
from benchmarks.judgement.reading import Reader, judged, rows_of
from rag_windows import APE, PCW, WindowedLM
from rag_windows.errors import MethodError


@pytest.fixture(scope="module")
def reader() -> Reader:
    return Reader(WindowedLM.from_pretrained("tiny-reader"))


@pytest.mark.parametrize("method", ["sequential", "ape"])
@pytest.mark.parametrize("task", ["single-hop", "not-stated", "follow-up", "classification"])
def test_one_pass_says_what_generate_writes(reader: Reader, task: str, method: str) -> None:
    """7 questions each, 56 in all; those over 24 passages are partly answered wrong."""
    lm = reader.lm
    for group in draw_groups(task, 24, 7, seed=3):
        prepared = reader.prepare(group)
        readings = reader.read(reader.encode(prepared, lm.engine.method_of(method)), prepared)
        written = [
            lm.generate(
                list(question.messages),
                group.passages,
                method=method,
                max_new_tokens=12,
                do_sample=False,
                citations=False,
            ).text.strip()
            for question in group.questions
        ]
        right = [text == one.answer for text, one in zip(written, group.questions, strict=True)]
        assert [reading.right for reading in readings] == right


def test_wrong_answers_count_as_wrong(reader: Reader) -> None:
    group = next(draw_groups("single-hop", 4, 8, seed=3))
    other = replace(group, questions=tuple(replace(q, answer="Arava") for q in group.questions))
    prepared = reader.prepare(other)
    assert not any(one.right for one in reader.read(reader.encode(prepared, PCW()), prepared))


def test_citations_are_those_of_generate(reader: Reader) -> None:
    group = next(draw_groups("single-hop", 4, 6, seed=3))
    prepared = reader.prepare(group)
    readings = reader.read(reader.encode(prepared, PCW()), prepared, citations=True)
    assert sum(one.right for one in readings) > 3
    for question, reading in zip(group.questions, readings, strict=True):
        if not reading.right:
            continue
        found = reader.lm.generate(
            list(question.messages), group.passages, method="pcw", do_sample=False
        ).citations
        assert found is not None
        assert reading.cited == max(found, key=lambda citation: citation.mass).passage


def test_methods_that_share_windows_read_what_they_would_encode(reader: Reader) -> None:
    prepared = reader.prepare(next(draw_groups("single-hop", 4, 4, seed=3)))
    ids, _ = rows_of(prepared.asked)
    method = APE(0.8, 0.9)
    assert shares_windows(PCW(), method)
    shared = replace(reader.encode(prepared, PCW()), method=method)
    decoder = reader.lm.engine.decoder
    own = decoder.forward(reader.encode(prepared, method), ids)
    torch.testing.assert_close(decoder.forward(shared, ids), own)


def test_ensembles_share_rows_and_answer_as_alone(reader: Reader) -> None:
    group = next(draw_groups("follow-up", 4, 5, seed=3))
    prepared = reader.prepare(group)
    found = [e.make(None, 4) for e in entries() if e.family == "ensemble"]
    scores = ensembles.bm25(group, group.questions)
    for method, readings in zip(
        found, ensembles.read_ensembles(reader, prepared, found), strict=True
    ):
        for one, own, reading in zip(prepared.asked, scores, readings, strict=True):
            context = reader.encode(prepared, method, own)
            ids, first = rows_of([one])
            logits = reader.lm.engine.decoder.forward(context, ids)[:, first:]
            alone = judged(logits.argmax(dim=-1).tolist(), [one], first)
            assert reading == alone[0]


def test_questions_are_as_many_as_asked_for_and_distinct() -> None:
    for task in TASKS:
        groups = list(draw_groups(task, 3, 21, seed=1))
        assert sum(len(group.questions) for group in groups) == 21
        assert groups == list(draw_groups(task, 3, 21, seed=1))
        assert groups != list(draw_groups(task, 3, 21, seed=2))
        for group in groups:
            asked = {json.dumps(question.messages) for question in group.questions}
            assert len(asked) == len(group.questions)


def test_two_hop_values_begin_behind_their_steps(reader: Reader) -> None:
    group = next(draw_groups("two-hop", 4, 4, seed=1))
    tokenizer = reader.lm.tokenizer
    assert tokenizer is not None
    for question, one in zip(group.questions, reader.prepare(group).asked, strict=True):
        assert question.steps
        value = question.answer.removeprefix(question.steps).strip()
        rest = tokenizer.decode(one.answer_ids[one.value_from : -1])
        assert rest.strip() == value


def test_every_method_of_the_list_exists() -> None:
    labels = [entry.label for entry in entries()]
    assert len(set(labels)) == len(labels)
    assert labels[0] == BASE
    for entry in entries():
        assert entry.make(APE(), 4).name
    with pytest.raises(MethodError, match="Unknown methods"):
        chosen(["pcw", "nothing"])
    calibrated = next(entry for entry in entries() if entry.label == "ape calibrated")
    with pytest.raises(MethodError, match="calibration"):
        calibrated.make(None, 4)


QUICK = [
    "--quick",
    "--jobs",
    "1",
    "--questions",
    "4",
    "--passages",
    "8",
    "--learner",
    "tiny-reader",
]
SOME = ["--methods", "sequential", "pcw", "ape", "linked 15%, first", "ensemble, uniform"]


def test_quick_run_writes_page_and_resumes(tmp_path: Path) -> None:
    place = ["--out", str(tmp_path), "--journal", str(tmp_path / "journal.jsonl")]
    methods.main([*QUICK, *SOME, *place, "--tasks", "single-hop"])
    page = (tmp_path / "methods.md").read_text(encoding="utf-8")
    assert "| sequential | " in page
    assert "| ensemble, uniform |" in page
    figures = json.loads((tmp_path / "methods" / "figures.json").read_text(encoding="utf-8"))
    assert {row["label"] for row in figures["cells"]} == set(SOME[1:])
    assert all(row["questions"] == 4 for row in figures["cells"])
    assert all(cost["agreed"] == cost["questions"] for cost in figures["costs"])
    for name in ("single-hop-tiny-reader", "retention", "cost"):
        assert (tmp_path / "methods" / f"{name}.png").stat().st_size > 10_000
    before = (tmp_path / "journal.jsonl").read_text(encoding="utf-8")
    # A line that was torn off is done again, everything else is there.
    (tmp_path / "journal.jsonl").write_text(before + '{"kind": "ce', encoding="utf-8")
    methods.main([*QUICK, *SOME, *place, "--tasks", "single-hop"])
    assert (tmp_path / "journal.jsonl").read_text(encoding="utf-8") == before
    (tmp_path / "methods.md").unlink()
    drawn = ["--draw", "--methods", "mateicl", *place, "--tasks", "single-hop"]
    methods.main([*QUICK, *drawn])
    assert (tmp_path / "journal.jsonl").read_text(encoding="utf-8") == before
    assert (tmp_path / "methods.md").read_text(encoding="utf-8") == page
    with pytest.raises(JournalError, match="other settings"):
        methods.main([*QUICK, *SOME, *place, "--tasks", "single-hop", "--seed", "9"])


def test_nothing_is_drawn_from_no_journal(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        methods.main(["--draw", "--journal", str(tmp_path / "none.jsonl")])
    assert not (tmp_path / "none.jsonl").exists()


def test_page_and_figures_must_fit() -> None:
    page = "a\n<!-- figures: one -->\nold\n<!-- end of figures -->\nb\n"
    filled = fill_page(page, {"one": lambda: "new\n"})
    assert filled == "a\n<!-- figures: one -->\nnew\n<!-- end of figures -->\nb\n"
    assert fill_page(filled, {"one": lambda: "new\n"}) == filled
    with pytest.raises(PageError, match="two"):
        fill_page(page, {"one": str, "two": str})
