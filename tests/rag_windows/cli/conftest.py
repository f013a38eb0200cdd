"""A small model and a folder of documents on disk, and a way to run the command on them."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from rag_windows.cli.commands import app
from tests.rag_windows import small

Run = Callable[..., Result]

BRIDGE = "# The Halden Bridge\n\nThe bridge at Halden was built in 1931 by Mara Olsen.\n"
OLSEN = "Mara Olsen was born in Tirmouth. She studied law.\n"
HOSTILE = "Lamps of [bold red]Halden[/] \x1b[31mred\x1b[0m \u202eback\u202c [/nonsense]"


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny matrices are faster on one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test finds what another one encoded."""
    monkeypatch.setenv("RAG_WINDOWS_CACHE_DIR", str(tmp_path_factory.mktemp("windows")))


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of the small seeded Llama; it never ends an answer by itself."""
    folder = tmp_path_factory.mktemp("model")
    endless = copy.deepcopy(small.model())  # all tests share the original
    endless.generation_config.eos_token_id = endless.config.eos_token_id = None
    endless.save_pretrained(folder)
    small.tokenizer().save_pretrained(folder)
    return str(folder)


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
def run() -> Run:
    """Run the command in this process: `run("ask", "Who?", stdin=...)`."""

    def invoke(*args: str | Path, stdin: str | bytes | None = None) -> Result:
        return CliRunner().invoke(app, [str(arg) for arg in args], input=stdin)

    return invoke
