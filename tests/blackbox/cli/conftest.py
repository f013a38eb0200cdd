"""A folder of documents, and a model that reads them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

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
