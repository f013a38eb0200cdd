"""What README shows of its programs' output."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from tests.test_repository import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_shipped_model_answers_as_shown(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The block of the shipped model and those after it, which go on from it."""
    monkeypatch.setenv("RAG_WINDOWS_CACHE_DIR", str(tmp_path / "windows"))
    fences = re.findall(r"^```(\w+)\n(.*?)^```", README, flags=re.DOTALL | re.MULTILINE)
    codes = [code for kind, code in fences if kind == "python"]
    (shown,) = (code for kind, code in fences if kind == "text")
    model, langchain, llama_index = codes[codes.index(next(filter(shipped, codes))) :]
    program = tmp_path / "program.py"
    cut = "print('---')\n"
    program.write_text(f"{model}{cut}{langchain}{cut}{llama_index}", encoding="utf-8")
    runpy.run_path(str(program), run_name="__main__")
    printed = capsys.readouterr().out
    first, second, third = re.sub(r"\d+%", "N%", printed).split("---\n")
    assert first == second == third == re.sub(r"\d+%", "N%", shown)


def shipped(code: str) -> bool:
    return 'from_pretrained("tiny-reader"' in code
