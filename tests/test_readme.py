"""What the documents promise: the example runs as printed, commands, links and methods exist."""

from __future__ import annotations

import json
import re
import runpy
import shlex
from pathlib import Path

import pytest
from typer.main import get_command

from rag_windows.cli.commands import app
from tests.test_repository import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
CUT = "-" * 20
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")


def python_block() -> str:
    (block,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    return str(block)


def commands(program: str) -> list[list[str]]:
    """The words of every indented command line of README.md that calls a program."""
    lines = re.findall(rf"^    {program} (.*)$", README, flags=re.MULTILINE)
    return [shlex.split(line, comments=True) for line in lines]


def test_the_examples_answer_rightly_one_after_the_other(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    blocks = re.findall(r"^```py(?:thon)?\n(.*?)^```", README, flags=re.DOTALL | re.MULTILINE)
    program = tmp_path / "examples.py"
    program.write_text(f"\nprint({CUT!r})\n".join(blocks), encoding="utf-8")
    runpy.run_path(str(program), run_name="__main__")
    printed = capsys.readouterr().out.split(f"{CUT}\n")
    core, langchain, llama_index, cached = (part.splitlines() for part in printed)
    for answer, *masses in (core, langchain):
        assert answer == "Sulava"
        assert sorted(re.sub(r"\d+", "N", line) for line in masses) == [
            "N% Aldan Pellby",
            "N% Vara Zelmont",
        ]
    (line,) = llama_index
    response, _, shares = line.partition(" ")
    assert response == "Sulava"
    low, high = sorted(json.loads(shares))
    assert 0 < low < high < low + high <= 1
    assert [int(number) > 0 for number in cached] == [True]


def test_the_python_example_is_short() -> None:
    assert len([line for line in python_block().splitlines() if line.strip()]) <= 10


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", MAKEFILE, flags=re.MULTILINE))
    named = {
        target
        for document in DOCUMENTS
        for target in re.findall(
            r"(?:`|^    )make ([a-z-]+)", document.read_text(encoding="utf-8"), flags=re.MULTILINE
        )
    }
    assert {"demo", "test", "lint"} <= named <= targets


def test_commands_and_options_exist() -> None:
    known = get_command(app).commands  # type: ignore[attr-defined]  # a group, which typer types as any command
    shown = commands("rag-windows")
    assert {words[0] for words in shown} >= {"ask", "chat", "methods"}
    for name, *words in shown:
        command = known[name]
        # Groups such as `eval` have commands of their own.
        while words and (inner := getattr(command, "commands", {}).get(words[0])):
            command, words = inner, words[1:]
        assert not getattr(command, "commands", {}), f"{name} needs a command behind it"
        options = {
            option
            for parameter in command.params
            for option in (*parameter.opts, *parameter.secondary_opts)
        }
        assert {word for word in words if word.startswith("--")} <= options


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    targets = [target.partition("#")[0] for target in re.findall(r"\]\(([^)]+)\)", text)]
    local = [target for target in targets if not target.startswith(("http:", "https:"))]
    assert [target for target in local if not (document.parent / target).exists()] == []


def test_paths_named_in_documents_exist() -> None:
    """Words in back-quotes that look like a path of this repository."""
    missing = []
    for document in DOCUMENTS:
        for name in re.findall(r"`([\w.-]+(?:/[\w.-]*)+)`", document.read_text(encoding="utf-8")):
            top = name.partition("/")[0]
            if (ROOT / top).exists() and not (ROOT / name).exists():
                missing.append(f"{document.name}: {name}")
    assert missing == []
