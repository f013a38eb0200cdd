"""`rag-windows eval` on invented data: what is written, kept, refused and told."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from rag_windows.cli.errors import EXIT_ERROR, EXIT_INTERRUPTED
from rag_windows.errors import GenerationError
from rag_windows.evaluation.answering import Answered, Asked, Generating
from rag_windows.evaluation.scores import packages
from tests.rag_windows.cli.conftest import Run
from tests.rag_windows.cli.evaluated import QUICK, one_line, records
from tests.rag_windows.evaluation.data import made

Eval = Callable[..., Any]


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """INSCIT's format, three turns over three passages."""
    monkeypatch.chdir(tmp_path)
    return made.write(tmp_path / "dev.json", made.inscit())


@pytest.fixture
def inscit(run: Run, data: Path, model: str) -> Eval:
    """`rag-windows eval inscit` on that file with a small model."""

    def start(*more: str | Path) -> Any:
        return run("eval", "inscit", "--data", data, "--model", model, *QUICK, *more)

    return start


def test_a_run_leaves_all_that_follows_from_its_answers(
    inscit: Eval, run: Run, data: Path, tmp_path: Path
) -> None:
    result = inscit("--out", "out", "--speed", "1")
    assert result.exit_code == 0, result.stderr
    out = tmp_path / "out"
    assert [one["kind"] for one in records(out)] == ["record"] * 9 + ["speed"] * 3
    for arm in ("sequential@2", "pcw@2", "ape@2"):
        assert arm in result.stdout
        file = out / "predictions" / f"{arm}.json"
        assert str(file.relative_to(tmp_path)) in result.stdout
        scored = run("eval", "score", "inscit", "--data", data, "--predictions", file, "--json")
        figures = json.loads(scored.stdout)
        assert set(figures) == {"evidence_f1", "bleu", "response_f1", "chatrag_f1", "n"}
        (told,) = (
            one for one in json.loads((out / "scores.json").read_text())["arms"]
            if one["name"] == arm
        )  # fmt: skip
        for metric in told["results"]:
            assert metric["estimate"]["value"] == pytest.approx(figures[metric["metric"]])
    for name in ("report.html", "report.md"):
        assert (out / name).stat().st_size > 1000


def test_the_second_method_with_windows_encodes_nothing(inscit: Eval, tmp_path: Path) -> None:
    assert inscit("--out", "out", "--methods", "pcw", "--methods", "ape").exit_code == 0
    pcw, ape = ([one for one in records(tmp_path / "out") if one["arm"] == arm]
                for arm in ("pcw@2", "ape@2"))  # fmt: skip
    assert sum(one["windows_encoded"] for one in pcw) == 3
    assert sum(one["windows_encoded"] for one in ape) == 0
    assert all(one["windows_reused"] == len(one["passages"]) for one in ape)


def test_the_same_command_asks_nothing_again(
    inscit: Eval, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = inscit("--json", "--methods", "ape")
    (folder,) = (tmp_path / "runs").iterdir()
    before = (folder / "records.jsonl").read_bytes()
    monkeypatch.setattr(Generating, "answer", None)
    second = inscit("--json", "--methods", "ape")
    assert second.exit_code == 0, second.stderr
    assert (folder / "records.jsonl").read_bytes() == before
    assert json.loads(first.stdout) == json.loads(second.stdout)
    assert json.loads(first.stdout)["files"]["folder"] == f"runs/{folder.name}"


def test_other_settings_are_refused_unless_fresh(inscit: Eval, tmp_path: Path) -> None:
    assert inscit("--out", "out", "--methods", "ape").exit_code == 0
    before = (tmp_path / "out" / "records.jsonl").read_bytes()
    other = inscit("--out", "out", "--methods", "ape", "--system", "Be brief.")
    assert other.exit_code == EXIT_ERROR
    assert "prefix" in other.stderr.splitlines()[-1]
    assert other.stderr.splitlines()[-1].startswith("Error: ")
    assert (tmp_path / "out" / "records.jsonl").read_bytes() == before
    fresh = inscit("--out", "out", "--methods", "ape", "--system", "Be brief.", "--fresh")
    assert fresh.exit_code == 0, fresh.stderr
    assert (tmp_path / "out" / "records.jsonl").read_bytes() != before


def test_shards_become_the_whole_run(inscit: Eval, run: Run, tmp_path: Path) -> None:
    options = ("--methods", "sequential,ape")
    for number in (1, 2):
        shard = inscit("--out", f"part{number}", "--shard", f"{number}/2", *options)
        assert shard.exit_code == 0, shard.stderr
    assert inscit("--out", "whole", *options).exit_code == 0
    merged = run("eval", "merge", "all", "part1", "part2", "--json")
    assert merged.exit_code == 0, merged.stderr
    for path in (tmp_path / "whole" / "predictions").iterdir():
        same = tmp_path / "all" / "predictions" / path.name
        assert json.loads(same.read_text()) == json.loads(path.read_text())
    found, whole = (json.loads((tmp_path / name / "scores.json").read_text())
                    for name in ("all", "whole"))  # fmt: skip
    assert [one["results"] for one in found["arms"]] == [one["results"] for one in whole["arms"]]
    lacking = run("eval", "merge", "half", "part1")
    assert lacking.exit_code == EXIT_ERROR
    one_line(lacking.stderr)


def test_an_interruption_keeps_what_is_answered(
    inscit: Eval, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = Generating.answer
    asked: list[Any] = []

    def interrupted(self: Generating, *args: Any) -> list[Answered]:
        if len(asked) == 4:
            raise KeyboardInterrupt
        asked.append(args)
        return answer(self, *args)

    monkeypatch.setattr(Generating, "answer", interrupted)
    monkeypatch.setattr("sys.argv", ["rag-windows", "eval", "inscit", "--fresh", "--out", "a b"])
    stopped = inscit("--out", "out")
    assert stopped.exit_code == EXIT_INTERRUPTED
    (told,) = stopped.stderr.splitlines()
    assert told.endswith("go on with: rag-windows eval inscit --out 'a b'")
    assert len(records(tmp_path / "out")) == 4
    asked.clear()
    assert inscit("--out", "out").exit_code == EXIT_INTERRUPTED
    asked[:] = [None]
    again = inscit("--out", "out")
    assert again.exit_code == 0, again.stderr
    found = [(one["key"], one["arm"]) for one in records(tmp_path / "out")]
    assert len(found) == len(set(found)) == 9


def test_questions_without_an_answer_are_told_and_asked_again(
    inscit: Eval, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = Generating.answer

    def failing(self: Generating, lm: Any, arm: Any, asked: Sequence[Asked]) -> list[Answered]:
        if asked[0][0].key == "coast/2/1" and arm.label == "ape":
            raise GenerationError("No luck\x1b[31m.")
        return answer(self, lm, arm, asked)

    with monkeypatch.context() as patch:
        patch.setattr(Generating, "answer", failing)
        result = inscit("--out", "out")
    assert result.exit_code == EXIT_ERROR
    told = one_line(result.stderr)
    assert "1 answer is missing" in told
    assert "'coast/2/1' of ape@2: No luck\\x1b[31m." in told
    assert "ape@2" in result.stdout
    again = inscit("--out", "out")
    assert again.exit_code == 0, again.stderr
    assert len(records(tmp_path / "out")) == 10


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--methods", "ape,nope"), "Unknown method 'nope'"),
        (("--top-k", "0"), "--top-k '2,0'"),
        (("--retriever", "dense"), "--embedder"),
        (("--shard", "3/2"), "no part 3 of 2"),
        (("--corpus", "c.jsonl", "--pool", "evidence"), "exclude each other"),
        (("--corpus", "nowhere.jsonl"), "nowhere.jsonl"),
        (("--data", "nowhere.json"), "nowhere.json"),
        (("--out", "dev.json"), "--out 'dev.json' can't be made"),
        (("--rag-scale", "0.5", "--methods", "pcw"), "--rag-scale"),
        (("--cache-memory", "much"), "memory='much' is no size"),
        (("--limit", "0"), "--limit"),
    ],
)
def test_arguments_are_refused_in_one_line(
    inscit: Eval, options: Sequence[str], message: str
) -> None:
    result = inscit(*options)
    assert result.exit_code == EXIT_ERROR
    assert message in one_line(result.stderr)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"a": {"turns": [', "dev.json"),
        ('{"a": {}}', '"turns"'),
        ("[]", "dev.json"),
        ('{"a": {"turns": [{"context": ["Who?"], "labels": []}]}}', "labels"),
        ('{"a": {"turns": [{"context": [], "labels": [{}]}]}}', "context"),
    ],
)
def test_malformed_data_is_told_before_any_work(
    inscit: Eval, data: Path, tmp_path: Path, content: str, message: str
) -> None:
    assert inscit("--out", "out", "--methods", "ape").exit_code == 0
    kept = {path.name: path.read_bytes() for path in (tmp_path / "out").glob("*.*")}
    data.write_text(content)
    result = inscit("--out", "out", "--methods", "ape")
    assert result.exit_code == EXIT_ERROR
    assert message in one_line(result.stderr)
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").glob("*.*")} == kept


def test_a_report_is_made_again_with_the_data_elsewhere(
    inscit: Eval, run: Run, data: Path, tmp_path: Path
) -> None:
    assert inscit("--out", "out", "--methods", "ape").exit_code == 0
    moved = tmp_path / "moved.json"
    shutil.move(data, moved)
    lost = run("eval", "report", "out", "--out", "again")
    assert lost.exit_code == EXIT_ERROR
    assert "dev.json" in one_line(lost.stderr)
    found = run("eval", "report", "out", "out", "--out", "again", "--data", moved)
    assert found.exit_code == 0, found.stderr
    assert (tmp_path / "again" / "report.html").is_file()
    other = made.inscit()
    other["coast/2"]["turns"][0]["context"] = ["Who owns the harbour?"]
    made.write(moved, other)
    wrong = run("eval", "report", "out", "--data", moved)
    assert wrong.exit_code == EXIT_ERROR
    assert "holds other data" in one_line(wrong.stderr)
    for folder in ("nowhere", "."):
        assert one_line(run("eval", "report", folder).stderr)


def test_a_missing_package_is_told_before_the_work(
    inscit: Eval, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        packages, "find_spec", lambda name: None if name == "spacy" else find_spec(name)
    )
    result = inscit("--out", "out")
    assert result.exit_code == EXIT_ERROR
    assert 'spacy; run: pip install ".[eval]"' in one_line(result.stderr)
    assert not (tmp_path / "out").exists()
