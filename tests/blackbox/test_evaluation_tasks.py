"""`rag-windows eval icl` and `passages`: what is asked, of what data, what is refused."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rag_windows import APE, Demonstration, Example, Passage, WindowedLM
from rag_windows_eval.icl import IclTask
from tests.blackbox.conftest import Run
from tests.blackbox.test_evaluation import one_line, records, scores

Rows = list[dict[str, Any]]
Eval = Callable[..., Any]


def write(path: Path, *rows: Any) -> Path:
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return path


def labelled(count: int = 24, labels: str = "ud") -> Rows:
    train = [
        {"text": f"text no. {i}", "label": labels[i % len(labels)], "split": "train"}
        for i in range(count)
    ]
    test = [
        {"text": f"text {'very ' * i}new", "label": labels[i % len(labels)], "split": "test"}
        for i in range(5)
    ]
    return train + test


@pytest.fixture
def icl(run: Run, tmp_path: Path, small_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Eval:
    """Run `eval icl` over some lines on a small model: its records, and passages by digest."""
    monkeypatch.chdir(tmp_path)

    def asked(rows: Rows, *options: str, methods: str = "pcw") -> Any:
        task = write(tmp_path / "task.jsonl", *rows)
        model = ("--task", task, "--model", small_folder, "--methods", methods)
        result = run("eval", "icl", *model, "--out", "out", "--fresh", *options)
        assert result.exit_code == 0, result.stderr
        texts = tmp_path / "out" / "passages.jsonl"
        lines = texts.read_text().splitlines() if texts.exists() else []
        found = {one["text"]: one["passage"] for one in map(json.loads, lines)}
        return records(tmp_path / "out"), found

    return asked


def test_texts_are_labelled_as_classify_does(icl: Eval, small_lm: WindowedLM) -> None:
    options = ("--shots", "10", "--windows", "3", "--calibrate-with", "N/A")
    found, texts = icl(labelled(), *options, "--system", "Judge.")
    (read,) = found[0]["passages"]
    shown = [tuple(line.split(": ")) for line in texts[read["text"]].split("\n")]
    assert Counter(label for _, label in shown) == {"u": 5, "d": 5}
    expected = small_lm.classify(
        [f"text {'very ' * i}new" for i in range(5)],
        shown,
        ["u", "d"],
        method="pcw",
        prefix="Judge.",
        windows=3,
        calibrate_with="N/A",
    )
    for one, other in zip(found, expected, strict=True):
        assert (one["answer"], one["finish_reason"]) == (other.label, "chosen")
        assert one["scores"] == pytest.approx(dict(other.scores), abs=1e-4)


def test_the_second_method_and_the_second_text_encode_nothing(icl: Eval) -> None:
    found, _ = icl(labelled(), "--shots", "24", "--windows", "4", methods="pcw,ape")
    counts = [(one["windows_encoded"], one["windows_reused"]) for one in found]
    assert counts == [(4, 0)] + [(0, 4)] * 9
    blind, _ = icl(labelled(), "--shots", "0")
    assert all(one["passages"] == [] for one in blind)


def test_one_after_the_other_as_many_are_read_as_fit(icl: Eval) -> None:
    found, texts = icl(labelled(200), "--shots", "200", methods="sequential,pcw")
    one, windowed = found[0], found[5]
    (read,) = (texts[each["text"]] for each in one["passages"])
    assert one["left_out"] == 200 - len(read.split("\n")) > 0
    # A letter is a token, and the model has 1,024 positions.
    assert 0.85 * 1024 < len(read) < 1024
    assert windowed["left_out"] == 0


def test_each_seed_shows_and_asks_its_own(icl: Eval, tmp_path: Path) -> None:
    options = ("--shots", "8", "--limit", "3")
    found, _ = icl(labelled(), *options)
    other, _ = icl(labelled(), *options, "--seed", "1")
    assert len(found) == len(other) == 3
    assert found[0]["passages"] != other[0]["passages"]
    settings = json.loads((tmp_path / "out" / "manifest.json").read_text())["settings"]["task"]
    assert settings["labels"] == ["u", "d"]
    assert settings["baselines"].keys() == {"chance", "majority"}
    assert [one["metric"] for one in scores(tmp_path / "out")["arms"][0]["results"]] == ["accuracy"]


def test_labels_take_turns_until_they_run_out(tmp_path: Path) -> None:
    rows = [{"text": str(i), "label": "abc"[0 if i < 20 else 1 + i % 2]} for i in range(26)]
    file = str(write(tmp_path / "a.jsonl", *rows))

    def order(seed: int) -> Sequence[Demonstration]:
        return IclTask.open(file, demonstrations=file, seed=seed).demonstrations

    made = order(3)
    assert sorted(int(one.text) for one in made) == list(range(26))
    for start in range(0, 9, 3):
        assert {one.label for one in made[start : start + 3]} == {"a", "b", "c"}
    assert [one.label for one in made[9:]] == ["a"] * 17
    assert made == order(3) != order(4)
    # Which label leads a round is drawn, too.
    assert len({order(seed)[0].label for seed in range(20)}) == 3


GOOD = {"text": "a", "label": "x", "split": "train"}


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([{"text": " ", "label": "x"}], "line 1, text: String should match"),
        ([GOOD, {**GOOD, "split": "dev"}], "line 2, split: Input should be 'train' or 'test'"),
        (
            [GOOD, {**GOOD, "label": "z"}, {"text": "b", "label": "y", "split": "test"}],
            "['y'] stands beside the labels ['x', 'z']",
        ),
        ([GOOD], 'no line has "split": "test"'),
        ([{**GOOD, "id": "n"}, {**GOOD, "id": "n"}], """line 2: the "id" 'n'"""),
    ],
)
def test_a_line_that_is_wrong_is_named(
    run: Run, tmp_path: Path, lines: list[Any], message: str
) -> None:
    result = run("eval", "icl", "--task", write(tmp_path / "a.jsonl", *lines))
    assert result.exit_code == 2
    assert "a.jsonl" in one_line(result.stderr)
    assert message in result.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("icl", "--task", "q.jsonl", "--shots", "5"), "5 demonstrations are asked for"),
        (("icl", "--task", "q.jsonl", "--shots", "-1"), "--shots"),
        (("passages", "--data", "q.jsonl", "--passages", "0"), "whole numbers from 1 on"),
    ],
)
def test_what_can_not_be_asked_is_refused_before_any_work(
    run: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: tuple[str, ...],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    write(Path("q.jsonl"), *labelled(4))
    result = run("eval", *options)
    assert result.exit_code == 2
    assert message in one_line(result.stderr)


def test_methods_get_the_numbers_behind_their_names_or_of_a_profile(
    icl: Eval, run: Run, tmp_path: Path, small_lm: WindowedLM
) -> None:
    examples = [Example(f"Which {n}?", [Passage("A lamp."), Passage("A door.")]) for n in range(8)]
    tried = [APE(0.7, 0.8)]
    profile = small_lm.compare(examples, tried, refine=False, max_new_tokens=2)
    replace(profile, method=tried[0]).save("p.json")
    named = "pcw,ape,ape:temperature=0.5,linked:tokens=8+pcw"
    icl(labelled(), "--shots", "2", "--profile", "p.json", methods=named)
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    found = [one["method"] for one in manifest["settings"]["arms"].values()]
    assert [(one["name"], one.get("temperature")) for one in found] == [
        *(("pcw", None), ("ape", 0.7), ("ape", 0.5), ("linked", None)),
    ]
    assert (found[3]["tokens"], found[3]["reader"]["name"]) == (8, "pcw")
    wrong = run("eval", "icl", "--task", "task.jsonl", "--profile", "p.json", "--methods", "pcw")
    assert "--profile holds numbers of the method ape" in one_line(wrong.stderr)


@pytest.mark.slow
def test_questions_that_bring_their_passages(
    run: Run, tmp_path: Path, small_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is asked once for each number of passages and method, and the run goes on."""
    monkeypatch.chdir(tmp_path)
    rows = [
        {
            "question": f"What is number {number}?",
            "answers": [f"{number}"],
            "ctxs": [{"text": f"It is {number * 10 + i}.", "isgold": i == 0} for i in range(6)],
        }
        for number in range(5)
    ]
    write(tmp_path / "dpr.jsonl", *rows)
    command = ("eval", "passages", "--data", "dpr.jsonl", "--passages", "2,4", "--out", "out")
    methods = ("--methods", "sequential,query-likelihood,pced", "--model", str(small_folder))
    short = ("--limit", "3", "--max-new-tokens", "2")
    result = run(*command, *methods, *short, "--json")
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["compared"] == 6
    assert found["groups"] == 3
    assert found["metrics"] == [
        *("contains", "exact", "f1", "not_mentioned"),
        *("cites_right", "cites_right_if_right"),
    ]
    asked = records(tmp_path / "out")
    assert len(asked) == 18
    assert {len(one["passages"]) for one in asked} == {2, 4}
    again = run(*command, *methods, *short, "--json")
    assert len(records(tmp_path / "out")) == 18, again.stderr
    report = (tmp_path / "out" / "report.md").read_text(encoding="utf-8")
    assert "query-likelihood" in report
    assert "4 passages" in report
