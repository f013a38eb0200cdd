from __future__ import annotations

import json
from pathlib import Path

import pytest

from rag_windows.errors import InputError, RetrievalError
from rag_windows.passage import Passage
from rag_windows_retrievers import BM25Retriever
from tests.retrievers.small import CORPUS

QUERIES = ("old bridge Halden", "ZÜRICH lakes?", "the of", "xylophone")


def test_a_loaded_index_ranks_alike(tmp_path: Path) -> None:
    built = BM25Retriever(CORPUS, k1=1.2, b=0.5)
    built.save(tmp_path)
    loaded = BM25Retriever.load(tmp_path)
    assert loaded.passages == built.passages
    for query in QUERIES:
        assert loaded.retrieve(query) == built.retrieve(query)
    loaded.save(tmp_path)
    assert BM25Retriever.load(tmp_path).retrieve("bridge") == built.retrieve("bridge")


def test_strange_texts_survive(tmp_path: Path) -> None:
    strange = [
        Passage("half \ud800 a pair\u2028and\x85 lines\r\n", "a\nb", 'quo"te', metadata={"": [1]}),
        Passage("", id=None),
    ]
    BM25Retriever(strange).save(tmp_path)
    assert BM25Retriever.load(tmp_path).passages == tuple(strange)


def test_nothing_is_pickled(tmp_path: Path) -> None:
    BM25Retriever(CORPUS).save(tmp_path)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {path.suffix for path in files} == {".npy", ".json", ".jsonl"}
    # Arrays of objects are what numpy would pickle.
    assert not any(b"|O" in path.read_bytes()[:128] for path in files if path.suffix == ".npy")


def test_metadata_must_be_json(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="metadata of passage 'x' can't be saved"):
        BM25Retriever([Passage("word", "x", metadata={"k": object()})]).save(tmp_path)
    assert not (tmp_path / "manifest.json").exists()


def test_other_rules_for_words_are_refused(tmp_path: Path) -> None:
    BM25Retriever(CORPUS).save(tmp_path)
    manifest = tmp_path / "manifest.json"
    row = json.loads(manifest.read_text())
    row["settings"]["words"] = 0
    manifest.write_text(json.dumps(row))
    with pytest.raises(RetrievalError, match="tells words apart by other rules"):
        BM25Retriever.load(tmp_path)
