from __future__ import annotations

import json
from pathlib import Path

import pytest

from rag_windows import WindowedLM
from tests.blackbox.conftest import Run

SHOWN = [("good film", "up"), ("bad film", "down"), ("fine book", "up"), ("dull book", "down")]


@pytest.fixture
def demos(tmp_path: Path) -> Path:
    """A file of demonstrations, with a blank line."""
    path = tmp_path / "demos.jsonl"
    rows = [json.dumps({"text": text, "label": label}) for text, label in SHOWN]
    path.write_text("\n".join([*rows[:2], "", *rows[2:]]), encoding="utf-8")
    return path


def test_json_holds_what_the_model_says(run: Run, demos: Path, model: str) -> None:
    options = ("--windows", "2", "--label", "up", "--label", "down", "--label", "so", "--json")
    result = run("classify", "a film", "a [red]book", "--demos", demos, "--model", model, *options)
    assert result.exit_code == 0, result.stderr
    answer = json.loads(result.stdout)
    assert (answer["demonstrations"], answer["windows"], answer["method"]) == (4, 2, "ape")
    lm = WindowedLM.from_pretrained(model)
    expected = lm.classify(["a film", "a [red]book"], SHOWN, ["up", "down", "so"], windows=2)
    for row, one in zip(answer["texts"], expected, strict=True):
        assert row.keys() == {"text", "label", "probabilities", "scores"}
        assert (row["text"], row["label"]) == (one.text, one.label)
        assert row["probabilities"] == pytest.approx(dict(one.probabilities), abs=1e-4)
        assert row["scores"] == pytest.approx(dict(one.scores), abs=1e-3)


def test_labels_and_probabilities_are_shown(run: Run, demos: Path, model: str) -> None:
    options = ("--demos", demos, "--model", model, "--calibrate-with", "N/A")
    told = json.loads(run("classify", "a [red]film\x07", "--json", *options).stdout)["texts"][0]
    shown = run("classify", "a [red]film\x07", *options)
    assert shown.exit_code == 0, shown.stderr
    (line,) = (one for one in shown.stdout.splitlines() if "a [red]film\\x07" in one)
    assert line.split()[:2] == [told["label"], f"{told['probabilities'][told['label']]:.0%}"]
    assert "4 demonstrations in 1 window," in shown.stdout


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "holds no demonstrations"),
        ('{"text": "a", "label": "x"}\n{"text": "a"}', "line 2: no object such as"),
        ("x", "line 1: no object such as"),
        ('["a", 3]', "line 1"),
        (None, "can't be read"),
    ],
)
def test_files_that_hold_something_else_are_refused(
    run: Run, tmp_path: Path, content: str | None, message: str
) -> None:
    path = tmp_path / "demos.jsonl"
    if content is not None:
        path.write_text(content, encoding="utf-8")
    result = run("classify", "a film", "--demos", path)
    assert result.exit_code == 2
    assert result.stderr.startswith("Error: ")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
