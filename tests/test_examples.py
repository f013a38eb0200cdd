"""Every example runs as it stands and answers rightly with the shipped models."""

from __future__ import annotations

import json
import re
import runpy
import sys

import pytest

from rag_windows.samples import samples_path
from tests.test_repository import ROOT

PROGRAMS = sorted((ROOT / "examples").glob("*.py"))
FRAMEWORKS = [path for path in PROGRAMS if re.match("langchain|llama_index", path.stem)]
FIRST, SECOND = (
    json.loads(line)
    for line in (samples_path() / "questions.jsonl").read_text(encoding="utf-8").splitlines()[:2]
)
OWN = {
    "classify": "24 of 24 right",
    "stream_a_conversation": "honey",
}
EVIDENCE = "Restless Ring|restless-ring|from 16 documents"


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
def test_it_answers_rightly(
    path: object, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [str(path)])
    runpy.run_path(str(path), run_name="__main__")
    printed = capsys.readouterr().out
    if path not in FRAMEWORKS:
        assert OWN[getattr(path, "stem", "")] in printed
        return
    asked, answer, *sources = printed.splitlines()
    assert asked == f"> {FIRST['question']}"
    assert answer.partition("  [")[0] == FIRST["answer"]
    assert re.search(EVIDENCE, printed.partition("\n")[2]) or not sources


def test_a_question_of_ones_own(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = ROOT / "examples" / "langchain_rag.py"
    monkeypatch.setattr(sys, "argv", ["x", "--question", SECOND["question"]])
    runpy.run_path(str(path), run_name="__main__")
    assert capsys.readouterr().out.startswith(f"> {SECOND['question']}\n{SECOND['answer']}\n")


def test_examples_stay_short() -> None:
    source = (ROOT / "examples" / "langchain_rag.py").read_text(encoding="utf-8")
    body = source.partition("def main")[2]
    assert len([line for line in body.splitlines() if line.strip()]) <= 20
    stuff = (ROOT / "examples" / "langchain_stuff_chain.py").read_text(encoding="utf-8")
    assert stuff.count("# Was: ") == 2, "it differs from LangChain's own chain in two lines"
