"""Indexes on disk: what is written is read again, whole, whoever else writes or breaks it."""

from __future__ import annotations

import json
import os
import struct
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rag_windows import InputError, MissingExtraError, Passage, RetrievalError
from rag_windows_retrievers import (
    BM25Retriever,
    DenseRetriever,
    HybridRetriever,
    TokenBudget,
    ingest,
    open_index,
    progress_bar,
)
from tests.retrievers.small import CORPUS, WordEncoder

QUERIES = ("old bridge Halden", "ZÜRICH lakes?", "the of", "xylophone")


def test_a_loaded_index_ranks_alike(tmp_path: Path) -> None:
    built = BM25Retriever(CORPUS, k1=1.2, b=0.5)
    built.save(tmp_path / "new" / "index")
    loaded = BM25Retriever.load(tmp_path / "new" / "index")
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


def test_metadata_must_be_json(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="metadata of passage 'x' can't be saved"):
        BM25Retriever([Passage("word", "x", metadata={"k": object()})]).save(tmp_path)
    assert list(tmp_path.iterdir()) == []


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-9])


def flipped(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-9] ^= 1
    file.write_bytes(data)


def empty(file: Path) -> None:
    file.write_bytes(b"")


def text(file: Path) -> None:
    file.write_text("{" * 99)


def another(file: Path) -> None:
    head = b'{"other":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'
    file.write_bytes(struct.pack("<Q", len(head)) + head + b"x")


@pytest.mark.parametrize("damage", [cut, flipped, empty, text, another])
@pytest.mark.parametrize("name", ["bm25", "dense"])
def test_damage_is_told_and_can_be_written_over(
    tmp_path: Path, name: str, damage: Callable[[Path], None]
) -> None:
    def save() -> None:
        BM25Retriever(CORPUS).save(tmp_path)
        DenseRetriever(CORPUS, WordEncoder()).save(tmp_path)

    save()
    damage(tmp_path / f"{name}.safetensors")
    with pytest.raises(RetrievalError, match=r"is damaged \(.*; delete it and build it anew"):
        open_index(tmp_path, WordEncoder())
    save()
    assert open_index(tmp_path, WordEncoder()).retriever.retrieve("bridge")


def described(file: Path, change: Callable[[str], str]) -> None:
    """Change what the file says of itself."""
    data = file.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    head = json.loads(data[8 : 8 + size])
    head["__metadata__"]["index"] = change(head["__metadata__"]["index"])
    made = json.dumps(head).encode()
    file.write_bytes(struct.pack("<Q", len(made)) + made + data[8 + size :])


def test_other_formats_and_changed_settings_are_told(tmp_path: Path) -> None:
    BM25Retriever(CORPUS).save(tmp_path)
    file = tmp_path / "bm25.safetensors"
    described(file, lambda head: head.replace('"words": 1', '"words": 2'))
    with pytest.raises(RetrievalError, match="not what was written"):
        BM25Retriever.load(tmp_path)
    described(file, lambda head: head.replace('"format": 2', '"format": 99'))
    with pytest.raises(RetrievalError, match="another version"):
        BM25Retriever.load(tmp_path)
    with pytest.raises(RetrievalError, match="no index in"):
        BM25Retriever.load(tmp_path / "nothing")


def test_a_failing_write_leaves_the_old_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    BM25Retriever(CORPUS).save(tmp_path)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", full)
        with pytest.raises(RetrievalError, match="can't be written: no space left"):
            BM25Retriever(CORPUS[:1]).save(tmp_path)
    assert len(BM25Retriever.load(tmp_path).passages) == len(CORPUS)
    assert [path.name for path in tmp_path.iterdir()] == ["bm25.safetensors"]


def test_readers_and_writers_do_not_disturb_each_other(tmp_path: Path) -> None:
    made = [BM25Retriever([Passage(f"{letter} " * 2000)]) for letter in "abcdefgh"]
    made[0].save(tmp_path)
    read: set[str] = set()
    failures: list[Exception] = []
    done = threading.Event()

    def reader() -> None:
        while not done.is_set():
            try:
                read.add(BM25Retriever.load(tmp_path).passages[0].text)
            except RetrievalError as error:
                failures.append(error)

    readers = [threading.Thread(target=reader) for _ in range(3)]
    for thread in readers:
        thread.start()
    with ThreadPoolExecutor(len(made)) as writers:
        list(writers.map(lambda one: one.save(tmp_path), made * 4))
    done.set()
    for thread in readers:
        thread.join()
    assert failures == []
    assert read <= {one.passages[0].text for one in made}


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


def test_a_bar_shows_only_on_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with progress_bar("Embedding") as progress:
        DenseRetriever(CORPUS, WordEncoder(), progress=progress)
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with progress_bar("Embedding") as progress:
        DenseRetriever(CORPUS, WordEncoder(), progress=progress)
    shown = capsys.readouterr().err
    assert "Embedding" in shown
    assert "5/5" in shown


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tqdm", None)
    with (
        pytest.raises(MissingExtraError, match=r"tqdm.*\.\[retrievers\]"),
        progress_bar(""),
    ):
        pass
