"""Every example runs as it stands and answers rightly with the shipped models."""

from __future__ import annotations

import json
import re
import runpy
import sys
from pathlib import Path

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
    "classify": ["24 of 24 right"],
    "quickstart_gpu": ["Sulava", "vara-zelmont.txt#1", "paper", "were in the cache"],
    "stream_a_conversation": ["Kassa", "honey"],
}
EVIDENCE = "Restless Ring|restless-ring"


@pytest.fixture(autouse=True)
def shipped_reader(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In place of the model that needs a GPU, and a cache folder of its own."""
    monkeypatch.setenv("RAG_WINDOWS_MODEL", "tiny-reader")
    monkeypatch.setenv("RAG_WINDOWS_CACHE_DIR", str(tmp_path))


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
def test_it_answers_rightly(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [str(path)])
    runpy.run_path(str(path), run_name="__main__")
    printed = capsys.readouterr().out
    if path not in FRAMEWORKS:
        assert [words for words in OWN[path.stem] if words not in printed] == []
        return
    asked, answer, *sources = printed.splitlines()
    assert asked == f"> {FIRST['question']}"
    assert answer.partition("  [")[0] == FIRST["answer"]
    assert re.search(EVIDENCE, "\n".join([answer, *sources]))


def test_a_question_of_ones_own(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = ROOT / "examples" / "langchain_lcel.py"
    monkeypatch.setattr(sys, "argv", ["x", "--question", SECOND["question"]])
    runpy.run_path(str(path), run_name="__main__")
    assert capsys.readouterr().out.startswith(f"> {SECOND['question']}\n{SECOND['answer']}\n")


def test_documents_and_questions_of_ones_own_are_found_in_the_cache_by_the_next_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "garage.md").write_text("Thornfield Garage makes paper.")
    given = ["--docs", str(docs), "What does Thornfield Garage make?"]
    monkeypatch.setattr(sys, "argv", ["x", *given])
    for told in "1 windows encoded, 0 were", "0 windows encoded, 1 were":
        runpy.run_path(str(ROOT / "examples" / "quickstart_gpu.py"), run_name="__main__")
        printed = capsys.readouterr().out
        assert printed.startswith(told)
        assert "\npaper\n" in printed
