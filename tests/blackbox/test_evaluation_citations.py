"""How right citations are: what `eval citations` measures."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rag_windows_eval.citing import CitationsTask
from rag_windows_eval.run import RunFolder
from rag_windows_eval.task import AnswerRecord, ReadPassage
from tests.blackbox.conftest import Run


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


PLACES = ("Arava", "Sulava", "Birholm", "Esia", "Birava", "Orava")


def questions(path: Path, count: int) -> Path:
    """Where somebody was born, over six passages of which one tells."""
    rows = []
    for number in range(count):
        people = [f"Alra Ashden{chr(97 + number)}{chr(97 + at)}" for at in range(6)]
        passages = [
            {"text": f"{name} was born in {place}.", "title": name, "right": at == number % 6}
            for at, (name, place) in enumerate(zip(people, PLACES, strict=True))
        ]
        asked = f"Where was {people[number % 6]} born?"
        answer = PLACES[number % 6]
        rows.append({"question": asked, "answer": answer, "passages": passages})
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return path


@pytest.mark.slow
def test_the_command_measures_both_ways(run: Run, tmp_path: Path) -> None:
    data = questions(tmp_path / "q.jsonl", 4)
    args = ("eval", "citations", "--data", data, "--model", "tiny-reader", "--max-new-tokens", "4")
    result = run(*args, "--methods", "sequential,ape,pced", "--out", "run", "--json")
    assert result.exit_code == 0, result.stderr
    figures = json.loads(result.stdout)
    assert [one["name"] for one in figures["arms"]] == ["sequential", "ape", "pced"]
    folder = RunFolder.open("run")
    for name, records in folder.records.items():
        for record in records.values():
            drops = [one.drop for one in record.passages]
            if name == "sequential":  # of which no passage can be left out
                assert drops == [None] * 6
                assert not record.effects
                continue
            assert all(isinstance(drop, float) for drop in drops)
            assert {f"drop_{k}_{kind}" for k in (1, 3, 5) for kind in ("mass", "removal")} <= (
                record.effects.keys()
            )
            assert len(record.ablations) == 8
            assert all(len(one.left_out) == 3 for one in record.ablations)
            # Without the passage that a ranking by removal puts first, the answer loses most.
            assert record.effects["drop_1_removal"] == pytest.approx(
                max(drop for drop in drops if drop is not None), abs=1e-3
            )
    again = run(*args, "--methods", "sequential,ape,pced", "--out", "run", "--json")
    assert json.loads(again.stdout)["arms"] == figures["arms"]
    assert run("eval", "report", "run").exit_code == 0


def test_sources_that_are_right_and_wrong(tmp_path: Path) -> None:
    def passage(name: str, mass: float, drop: float, supports: Any) -> ReadPassage:
        return ReadPassage("x", name, mass=mass, drop=drop, supports=supports)

    read = (passage("q/1", 0.5, 0.1, "no"), passage("q/2", 0.2, 9.0, "yes"))
    record = AnswerRecord("1", "ape", "Sulava", passages=read, supported=True)
    task = CitationsTask(name="t", examples=[], settings={})
    path = tmp_path / "q.jsonl"
    given = [{"text": "a"}, {"text": "b", "right": True}]
    row = {"question": "Q?", "answers": ["Sulava"], "passages": given, "id": "q"}
    path.write_text(json.dumps(row), encoding="utf-8")
    (example,) = CitationsTask.read(str(path)).examples
    found = {one.name: one.value for one in task.scores([example], [record])}
    wanted = {"top_mass": 0.0, "top_removal": 100.0, "top_chance": 50.0, "contains": 100.0}
    assert {name: found[name] for name in wanted} == wanted
    assert (found["precision_removal"], found["recall_removal"]) == (100.0, 100.0)
    assert (found["precision_mass"], found["cited_mass"]) == (0.0, 100.0)
    other = replace(record, answer="in another town")
    of_right = {one.name: one.value for one in task.scores([example], [other])}
    assert (np.isnan(of_right["top_removal"]), of_right["cited_removal"]) == (True, 100.0)
    every = CitationsTask.read(str(path), every_answer=True)
    of_every = {one.name: one.value for one in every.scores([example], [other])}
    assert (of_every["top_removal"], of_every["contains"]) == (100.0, 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["passages", "citations"])
def test_more_questions_go_on_where_fewer_stopped(run: Run, tmp_path: Path, kind: str) -> None:
    data = questions(tmp_path / "q.jsonl", 3)
    model = ("--model", "tiny-reader", "--max-new-tokens", "2")
    args = ("eval", kind, "--data", data, *model, "--methods", "ape", "--out", "run")
    assert run(*args, "--limit", "1").exit_code == 0
    first = Path("run/records.jsonl").read_text()
    for more in (("--limit", "2"), ()):
        result = run(*args, *more)
        assert result.exit_code == 0, result.stderr
        assert Path("run/records.jsonl").read_text().startswith(first)
    assert len(Path("run/records.jsonl").read_text().splitlines()) == 3
    fewer = run(*args, "--limit", "2")
    assert fewer.exit_code == 2
    assert "other settings" in fewer.stderr
    for option in (("--seed", "4"), *([("--halves", "3")] * (kind == "citations"))):
        other = run(*args, *option)
        assert other.exit_code == 2, option
        assert "other settings" in other.stderr


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["passages", "citations"])
def test_more_methods_go_on_where_fewer_stopped(run: Run, tmp_path: Path, kind: str) -> None:
    data = questions(tmp_path / "q.jsonl", 2)
    model = ("--model", "tiny-reader", "--max-new-tokens", "2")
    args = ("eval", kind, "--data", data, *model, "--out", "run", "--methods")
    assert run(*args, "ape", "--limit", "1").exit_code == 0
    first = Path("run/records.jsonl").read_text()
    more = run(*args, "pcw,ape")
    assert more.exit_code == 0, more.stderr
    found = Path("run/records.jsonl").read_text()
    assert found.startswith(first)
    asked = [(one["arm"], one["key"]) for one in map(json.loads, found.splitlines())]
    assert len(set(asked)) == len(asked) == 4
    for other in ("pcw", "pcw,ape:temperature=0.5"):
        refused = run(*args, other)
        assert refused.exit_code == 2
        assert "other settings" in refused.stderr


@pytest.mark.slow
def test_what_the_passages_of_a_file_can_not_give_is_said(run: Run, tmp_path: Path) -> None:
    data = questions(tmp_path / "q.jsonl", 2)
    plain = tmp_path / "plain.jsonl"
    plain.write_text(data.read_text(encoding="utf-8").replace("true", "false"), encoding="utf-8")
    model = ("--model", "tiny-reader", "--max-new-tokens", "1", "--methods", "ape", "--limit", "1")

    def said(file: Path, sizes: str) -> str:
        result = run("eval", "passages", "--data", file, *model, "--passages", sizes, "--fresh")
        assert result.exit_code == 0, result.stderr
        return " ".join(result.stderr.split())

    assert "1 of 1 questions bring fewer than 9 passages" in said(data, "3,9")
    assert "1 of 1 questions mark no passage as right" in said(plain, "3,6")
    assert "Note" not in said(data, "3,6")
    assert "Note" not in said(plain, "6")
