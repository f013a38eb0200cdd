"""The command line as a newcomer types it: every test goes through commands and their output."""

from __future__ import annotations

import tomllib

import pytest
from packaging.requirements import Requirement

from tests.blackbox.conftest import ROOT, Process, Run


def test_the_base_install_brings_the_command_line() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    base = {Requirement(line).name for line in project["dependencies"]}
    assert {"typer", "rich", "bm25s", "huggingface-hub"} <= base


def test_without_any_extra_the_command_answers(python: Process) -> None:
    extras = ["accelerate", "datasets", "langchain", "langchain_core", "llama_index", "lm_eval"]
    extras += ["matplotlib", "pypdf", "sacrebleu", "sentence_transformers", "spacy", "usearch"]
    done = python(
        f"import sys\nfor name in {extras}: sys.modules[name] = None\n"
        "sys.argv = ['rag-windows', 'ask', 'What does Zelwick Academy make?', '--device', 'cpu']\n"
        "from rag_windows.cli.app import main\nmain()"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("cheese\n")


@pytest.mark.parametrize("args", [(), ("cache",), ("eval",), ("eval", "score")])
def test_a_group_of_commands_shows_its_help(run: Run, args: tuple[str, ...]) -> None:
    lone = run(*args)
    assert (lone.exit_code, lone.stderr) == (0, "")
    assert lone.stdout.strip() == run(*args, "--help").stdout.strip()
    assert "Commands" in lone.stdout


@pytest.mark.parametrize("command", ["ask", "chat", "classify", "calibrate", "bench", "cache warm"])
def test_flags_take_no_value(run: Run, command: str) -> None:
    shown = run(*command.split(), "--help").stdout
    assert "<bool>" not in shown
    assert "--verbose" in shown
