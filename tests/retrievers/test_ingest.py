from __future__ import annotations

from pathlib import Path

import pytest

from rag_windows.errors import RetrievalError
from rag_windows_retrievers import BM25Retriever, HybridRetriever, TokenBudget, ingest, open_index
from tests.retrievers.small import WordEncoder


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    folder = tmp_path / "docs"
    folder.mkdir()
    (folder / "halden.md").write_text("# Halden\n\nThe bridge was built in 1931.\n\nIt is old.")
    (folder / "notes.txt").write_text("Bakers sell bread. " * 30)
    (folder / "rows.jsonl").write_text('{"id": "z", "text": "Zürich has lakes."}\n')
    (folder / "logo.png").write_bytes(b"\x89PNG\x00")
    return folder


def test_files_become_a_retriever_on_disk(docs: Path, tmp_path: Path) -> None:
    made = ingest([docs], tmp_path / "index", WordEncoder(), words=40)
    assert isinstance(made.retriever, HybridRetriever)
    assert made.retriever.retrieve("When was the bridge built?", 1)[0].id == "docs/halden.md#1"
    assert [one.label for one in made.skipped] == ["docs/logo.png"]
    opened = open_index(tmp_path / "index", WordEncoder())
    for query in ("lakes", "bread", "old bridge"):
        assert opened.retriever.retrieve(query) == made.retriever.retrieve(query)
    assert opened.passages == made.passages


def test_provenance_leads_back_to_the_file(docs: Path, tmp_path: Path) -> None:
    made = ingest([docs / "notes.txt"], tmp_path / "index", words=20, root=docs)
    text = (docs / "notes.txt").read_text()
    for number, one in enumerate(made.passages, start=1):
        assert one.id == f"notes.txt#{number}"
        assert one.metadata["source"] == "notes.txt"
        assert text[one.metadata["start"] : one.metadata["end"]] == one.text


def test_what_did_not_change_is_not_embedded_again(docs: Path, tmp_path: Path) -> None:
    encoder = WordEncoder()
    first = ingest([docs], tmp_path / "index", encoder, words=40)
    assert first.dense is not None
    assert first.dense.embedded == len({one.text for one in first.passages})
    again = ingest([docs], tmp_path / "index", encoder, words=40)
    assert again.dense is not None
    assert again.dense.embedded == 0
    assert again.passages == first.passages
    (docs / "rows.jsonl").write_text('{"id": "b", "text": "Bern has a river."}\n')
    told: list[tuple[int, int]] = []
    last = ingest(
        [docs], tmp_path / "index", encoder, words=40, progress=lambda *one: told.append(one)
    )
    assert last.dense is not None
    assert last.dense.embedded == 1
    assert told == [(1, 1)]
    assert "z" not in {one.id for one in last.retriever.retrieve("Zürich lakes")}
    assert last.retriever.retrieve("river", 1)[0].id == "b"


def test_a_budget_in_tokens(docs: Path, tmp_path: Path) -> None:
    budget = TokenBudget(12, lambda text: len(text.split()))
    made = ingest([docs], tmp_path / "index", tokens=budget)
    assert max(len(one.text.split()) for one in made.passages) <= 12
    assert isinstance(made.retriever, BM25Retriever)


def test_another_model_needs_another_folder(docs: Path, tmp_path: Path) -> None:
    ingest([docs], tmp_path / "index", WordEncoder())
    with pytest.raises(RetrievalError, match=r"delete the folder and embed"):
        ingest([docs], tmp_path / "index", WordEncoder("others"))
    with pytest.raises(RetrievalError, match="no index in"):
        open_index(tmp_path / "nowhere")
