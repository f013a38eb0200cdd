from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest

from tests.test_repository import ROOT

SAMPLES = ROOT / "rag_windows" / "samples"
FIRST, SECOND = (
    json.loads(line)
    for line in (SAMPLES / "questions.jsonl").read_text(encoding="utf-8").splitlines()[:2]
)


def run(
    name: str,
    arguments: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> list[str]:
    program = Path(ROOT) / "examples" / name
    monkeypatch.setattr(sys, "argv", [str(program), *arguments])
    runpy.run_path(str(program), run_name="__main__")
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize(
    "name", ["llama_index_query_engine.py", "llama_index_streaming_citations.py"]
)
def test_the_question_is_answered_with_its_sources(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked, answer, *sources = run(name, [], monkeypatch, capsys)
    assert asked == f"> {FIRST['question']}"
    assert answer == FIRST["answer"]
    assert len(sources) == 3
    assert FIRST["document"] in " ".join(sources)


def test_the_chat_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = run("llama_index_chat_engine.py", [], monkeypatch, capsys)
    assert lines[0::2] == [f"> {FIRST['question']}", f"> {SECOND['question']}"]
    assert lines[1].startswith(f"{FIRST['answer']}  [")
    assert len(lines) == 4


def test_a_question_of_ones_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--model", "tiny-reader", "--question", SECOND["question"]]
    lines = run("llama_index_query_engine.py", arguments, monkeypatch, capsys)
    assert lines[0] == f"> {SECOND['question']}"
