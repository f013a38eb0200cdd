"""How right citations are: what `eval citations` measures, and what `eval heads` makes of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rag_windows import DataError, Profile, WindowedLM
from rag_windows.samples import sample_questions
from rag_windows_eval.citing import CitationsTask
from rag_windows_eval.heads import LEAST, fit
from rag_windows_eval.run import RunFolder
from rag_windows_eval.task import Ablation, AnswerRecord, ReadPassage
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


def answered(count: int, noise: float, seed: int = 0) -> list[AnswerRecord]:
    """Answers that follow three of sixteen heads."""
    draw = np.random.default_rng(seed)
    weights = np.zeros(16)
    weights[[2, 7, 11]] = 3.0, 1.0, 2.0
    records = []
    for number in range(count):
        heads = draw.gamma(0.5, 1.0, (6, 16))
        left_out = [tuple(sorted(draw.choice(6, 3, replace=False).tolist())) for _ in range(8)]
        scores = heads @ weights
        logprobs = [
            float(scores.sum() - scores[list(some)].sum() + draw.normal(0, noise))
            for some in left_out
        ]
        records.append(
            AnswerRecord(
                str(number),
                "ape",
                "x",
                passages=tuple(ReadPassage("x", drop=float(one), mass=0.1) for one in scores),
                ablations=tuple(map(Ablation, left_out, logprobs)),
                heads=tuple(map(tuple, heads.tolist())),
                layers=4,
            )
        )
    return records


def test_weights_find_the_heads_that_know() -> None:
    fitted = fit(answered(60, noise=0.3), layers=4)
    assert fitted.weights.shape == (4, 4)
    assert fitted.weights.mean() == pytest.approx(1.0)
    assert set(np.argsort(-fitted.weights.flatten())[:3]) == {2, 7, 11}
    lds = {name: mean.value for name, mean in fitted.lds.items()}
    assert lds["equal weights"] + 0.1 < lds["fitted weights"] <= lds["removals"] + 0.02
    with pytest.raises(DataError, match=f"at least {LEAST} are needed"):
        fit(answered(LEAST - 1, noise=0.3), layers=4)


def test_without_a_signal_weights_stay_equal() -> None:
    records = answered(40, noise=200.0)
    weights = fit(records, layers=4).weights
    assert np.abs(weights - 1).max() < 0.9


def test_fitted_weights_go_into_a_profile_and_back(run: Run, tmp_path: Path) -> None:
    data = questions(tmp_path / "q.jsonl", LEAST)
    base = ("--model", "tiny-reader", "--max-new-tokens", "4")
    args = ("eval", "citations", "--data", data, *base, "--methods", "ape", "--out", "run")
    made = run(*args, "--heads")
    assert made.exit_code == 0, made.stderr
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    for row in rows:
        row["passages"] = [{"text": one["text"]} for one in row["passages"]]
    unmarked = tmp_path / "unmarked.jsonl"
    unmarked.write_text("\n".join(map(json.dumps, rows)))
    compared = (
        "compare",
        "--questions",
        unmarked,
        *base,
        "--methods",
        "ape,pcw",
        "--out",
        "p.json",
    )
    made = run(*compared)
    assert made.exit_code == 0, made.stderr
    result = run("eval", "heads", "run", "--profile", "p.json", "--out", "with.json")
    assert result.exit_code == 0, result.stderr
    for name in ("equal weights", "fitted weights", "removals", "Use it: --profile with.json"):
        assert name in result.stdout
    profile = Profile.load("with.json")
    assert profile.heads is not None
    lm = WindowedLM.from_pretrained("tiny-reader", profile=profile)
    plain = WindowedLM.from_pretrained("tiny-reader", profile="p.json")
    asked: dict[str, Any] = {"query": sample_questions()[0], "passages": ["A book.", "A film."]}
    one, two = (each.generate(**asked, max_new_tokens=3) for each in (lm, plain))
    assert one.token_ids == two.token_ids
    masses = [[cited.mass for cited in made.citations or ()] for made in (one, two)]
    assert masses[0] != pytest.approx(masses[1], abs=1e-6)
    for wrong, why in (
        (("--method", "sequential"), "Those that have are ape"),
        (("--method", "pced"), "says what each head looked at"),
    ):
        refused = run("eval", "heads", "run", "--profile", "p.json", "--out", "x.json", *wrong)
        assert refused.exit_code == 2
        assert why in refused.stderr
    assert not Path("x.json").exists()


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
    for option in (("--seed", "4"), *([("--heads",), ("--halves", "3")] * (kind == "citations"))):
        other = run(*args, *option)
        assert other.exit_code == 2, option
        assert "other settings" in other.stderr


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
