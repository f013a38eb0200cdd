"""The kinds of task beside INSCIT that `rag-windows eval` asks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rag_windows.cli.errors import EXIT_ERROR
from tests.rag_windows.cli.conftest import Run
from tests.rag_windows.cli.evaluated import QUICK, one_line, records
from tests.rag_windows.evaluation.data import made


def test_chatrag_reads_the_passages_of_the_file(
    run: Run, tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = made.write(tmp_path / "doc2dial.json", [made.chatrag(), made.chatrag(answers=["x"])])
    options = ("--data", path, "--dataset", "doc2dial")
    result = run("eval", "chatrag", *options, "--model", model, *QUICK, "--out", "out")
    assert result.exit_code == 0, result.stderr
    file = tmp_path / "out" / "predictions" / "ape@2.txt"
    assert len(file.read_text().splitlines()) == 2
    scored = run("eval", "score", "chatrag", *options, "--predictions", file, "--json")
    assert json.loads(scored.stdout)["n"] == 2
    assert "f1" in run("eval", "score", "chatrag", *options, "--predictions", file).stdout
    wrong = run("eval", "chatrag", "--data", path, "--dataset", "doc3dial")
    assert wrong.exit_code == EXIT_ERROR
    assert "doc2dial" in one_line(wrong.stderr)


def test_demonstrations_are_counted_by_shots(
    run: Run, tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [{"text": f"{word} film", "label": label, "split": split}
            for split, words in (("train", "good bad"), ("test", "fine dull"))
            for word, label in zip(words.split(), ("up", "down"), strict=True)]  # fmt: skip
    path = made.write_lines(tmp_path / "films.jsonl", rows)
    options = ("--task", path, "--model", model, "--methods", "sequential,ape", "--out", "out")
    result = run("eval", "icl", *options, "--shots", "0,2")
    assert result.exit_code == 0, result.stderr
    assert {one["arm"] for one in records(tmp_path / "out")} == {
        "sequential@0", "ape@0", "sequential@2", "ape@2"
    }  # fmt: skip
    assert "chance 50.0" in result.stdout
    more = run("eval", "icl", *options, "--shots", "3")
    assert "3 demonstrations are asked for" in one_line(more.stderr)


def test_a_sweep_shows_each_cell(
    run: Run, tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    options = ("--passages", "1,3", "--positions", "0,1", "--questions", "1", "--speed", "0")
    ran = ("--model", model, "--methods", "ape", "--max-new-tokens", "3", "--out", "out")
    result = run("eval", "long", *options, *ran)
    assert result.exit_code == 0, result.stderr
    assert len(records(tmp_path / "out")) == 3
    assert "Found by ape" in result.stdout
    wrong = run("eval", "long", "--positions", "first")
    assert "--positions 'first'" in one_line(wrong.stderr)
