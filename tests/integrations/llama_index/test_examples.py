"""The LlamaIndex examples answer rightly on the embedded reader."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
QUESTIONS = ROOT / "rag_windows" / "samples" / "questions.jsonl"
FIRST, SECOND = map(json.loads, QUESTIONS.read_text(encoding="utf-8").splitlines()[:2])
ONE_S_OWN = ["--model", "tiny-reader", "--question", SECOND["question"]]


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("query_engine", []),
        ("streaming_citations", []),
        ("chat_engine", []),
        ("query_engine", ONE_S_OWN),
    ],
)
def test_the_question_is_answered_with_its_sources(
    name: str,
    arguments: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    program = str(ROOT / "examples" / f"llama_index_{name}.py")
    monkeypatch.setattr(sys, "argv", [program, *arguments])
    runpy.run_path(program, run_name="__main__")
    asked, answer, *rest = capsys.readouterr().out.splitlines()
    first = SECOND if arguments else FIRST
    assert asked == f"> {first['question']}"
    if name == "chat_engine":
        assert answer.startswith(f"{FIRST['answer']}  [")
        assert (rest[0], len(rest)) == (f"> {SECOND['question']}", 2)
    elif not arguments:
        assert (answer, len(rest)) == (FIRST["answer"], 3)
        assert FIRST["document"] in " ".join(rest)
