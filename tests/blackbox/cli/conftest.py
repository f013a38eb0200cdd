"""A folder of documents, and a model that reads them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.blackbox.conftest import Run

BRIDGE = "# The Halden Bridge\n\nThe bridge at Halden was built in 1931 by Mara Olsen.\n"
OLSEN = "Mara Olsen was born in Tirmouth. She studied law.\n"
HOSTILE = "Lamps of [bold red]Halden[/] \x1b[31mred\x1b[0m \u202eback\u202c [/nonsense]"
QUESTION = "Who built the bridge at Halden?"
INSTRUCTION = (
    "Answer the question with a short phrase, using the documents. If no document answers it, say "
    "that it is not stated."
)
"""What commands send by themselves."""
SHORT = ("--max-new-tokens", "12")

Told = Callable[..., dict[str, Any]]


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tiny matrices are faster on one thread."""
    monkeypatch.delenv("RAG_WINDOWS_MODEL", raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def model(small_folder: Path) -> str:
    """Folder of the small seeded Llama; it never ends an answer by itself."""
    return str(small_folder)


def write_documents(folder: Path) -> None:
    """Four passages in a new folder."""
    folder.mkdir()
    (folder / "bridge.md").write_text(BRIDGE)
    (folder / "olsen.txt").write_text(OLSEN)
    rows = [{"id": "lamps", "title": "[red]Lamps\x07", "text": HOSTILE}, {"text": "Boats."}]
    (folder / "more.jsonl").write_text("\n".join(map(json.dumps, rows)))


@pytest.fixture
def docs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with documents in ./docs."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "docs"
    write_documents(folder)
    return folder


@pytest.fixture
def ask(run: Run, docs: Path, model: str) -> Told:
    """The JSON of an answer: `ask("--top-k", "1")`; and its stderr."""

    def invoke(*args: str | Path) -> dict[str, Any]:
        given = (*SHORT, *args)
        given += () if "--docs" in args else ("--docs", "docs")
        given += () if "--model" in args else ("--model", model)
        result = run("ask", QUESTION, "--json", *given)
        assert result.exit_code == 0, result.stderr
        assert result.stdout.count("\n") == 1
        answer: dict[str, Any] = json.loads(result.stdout)
        return {**answer, "stderr": result.stderr}

    return invoke


def refused(run: Run, *args: str | Path, stdin: str | None = None) -> str:
    """The one line that a wrong command says."""
    result = run(*args, stdin=stdin)
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    (line,) = result.stderr.splitlines()
    assert line.startswith("Error: ")
    assert "\x1b" not in line
    return line
