"""Indexes on disk: what is written is read again, whole, whoever else writes or breaks it."""

from __future__ import annotations

import os
import struct
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rag_windows import InputError, Passage, RetrievalError
from rag_windows_retrievers import (
    DenseRetriever,
    HybridRetriever,
    ingest,
    open_index,
    progress_bar,
)
from rag_windows_retrievers.indexes import PROBE
from tests.retrievers.small import CORPUS, WordEncoder, ranking


def dense(*passages: Passage) -> DenseRetriever:
    return DenseRetriever(passages, WordEncoder())


def test_a_loaded_index_ranks_alike_and_keeps_strange_texts(tmp_path: Path) -> None:
    strange = Passage("half \ud800 a\u2028and\x85 lines\r\n", "a\nb", 'quo"te', metadata={"": [1]})
    built = dense(*CORPUS, strange, Passage(""))
    built.save(tmp_path / "new" / "index")
    encoder = WordEncoder()
    loaded = DenseRetriever.load(tmp_path / "new" / "index", encoder)
    assert loaded.passages == built.passages
    # Nothing but the probes is embedded again.
    assert tuple(encoder.asked) == PROBE
    for query in ("old bridge Halden", "ZÜRICH lakes?", "the of"):
        assert ranking(loaded.retrieve(query)) == ranking(built.retrieve(query))


def test_metadata_must_be_json(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="metadata can't be saved as JSON"):
        dense(Passage("word", "x", metadata={"k": object()})).save(tmp_path)
    assert list(tmp_path.iterdir()) == []


ANOTHER = b'{"other":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'


def test_damage_is_told_and_can_be_written_over(tmp_path: Path) -> None:
    dense(*CORPUS).save(tmp_path)
    file = tmp_path / "dense.safetensors"
    data = file.read_bytes()
    flipped = data[:-9] + bytes([data[-9] ^ 1]) + data[-8:]
    another = struct.pack("<Q", len(ANOTHER)) + ANOTHER + b"x"
    for damaged in (data[:-9], flipped, b"", another, data.replace(b"settings", b"Settings")):
        file.write_bytes(damaged)
        with pytest.raises(RetrievalError, match=r"is damaged \(.*\. Delete it and build it again"):
            DenseRetriever.load(tmp_path, WordEncoder())
    file.write_bytes(data.replace(b'format\\": 2', b'format\\": 9'))
    with pytest.raises(RetrievalError, match="another version"):
        DenseRetriever.load(tmp_path, WordEncoder())
    dense(*CORPUS).save(tmp_path)
    assert DenseRetriever.load(tmp_path, WordEncoder()).retrieve("bridge")


def test_a_failing_write_leaves_the_old_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dense(*CORPUS).save(tmp_path)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", full)
        with pytest.raises(RetrievalError, match="can't be written: No space left"):
            dense(CORPUS[0]).save(tmp_path)
    assert len(DenseRetriever.load(tmp_path, WordEncoder()).passages) == len(CORPUS)
    assert [path.name for path in tmp_path.iterdir()] == ["dense.safetensors"]


def test_readers_and_writers_do_not_disturb_each_other(tmp_path: Path) -> None:
    made = [dense(Passage(f"{letter} " * 2000)) for letter in "abcdefgh"]
    made[0].save(tmp_path)
    done = threading.Event()

    def read() -> set[str]:
        found = set()
        while not done.is_set():
            found.add(DenseRetriever.load(tmp_path, WordEncoder()).passages[0].text)
        return found

    with ThreadPoolExecutor(3) as readers, ThreadPoolExecutor(len(made)) as writers:
        reading = [readers.submit(read) for _ in range(3)]
        list(writers.map(lambda one: one.save(tmp_path), made * 4))
        done.set()
        for one in reading:
            assert one.result() <= {one.passages[0].text for one in made}


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    folder = tmp_path / "docs"
    folder.mkdir()
    (folder / "halden.md").write_text("# Halden\n\nThe bridge was built in 1931.\n\nIt is old.")
    (folder / "notes.txt").write_text("Bakers sell bread. " * 30)
    (folder / "rows.jsonl").write_text('{"id": "z", "text": "Zürich has lakes."}\n')
    (folder / "logo.png").write_bytes(b"\x89PNG\x00")
    return folder


def test_an_index_follows_the_files_and_embeds_only_what_is_new(docs: Path, tmp_path: Path) -> None:
    place, told = tmp_path / "index", []
    made = ingest([docs], place, WordEncoder(), words=40, root=tmp_path)
    assert isinstance(made.retriever, HybridRetriever)
    assert made.retriever.retrieve("When was the bridge built?", 1)[0].id == "docs/halden.md#1"
    assert [one.label for one in made.skipped] == ["docs/logo.png"]
    moved = WordEncoder()
    moved.name = "/elsewhere/words"
    opened = open_index(place, moved)
    assert opened.passages == made.passages
    for query in ("lakes", "bread", "old bridge"):
        assert opened.retriever.retrieve(query) == made.retriever.retrieve(query)
    (docs / "rows.jsonl").write_text('{"id": "b", "text": "Bern has a river."}\n')
    later = ingest([docs], place, WordEncoder(), words=40, progress=lambda *one: told.append(one))
    assert told == [(1, 1)]
    assert "z" not in {one.id for one in later.retriever.retrieve("Zürich lakes")}
    assert later.retriever.retrieve("river", 1)[0].id == "b"
    for other in (WordEncoder("others"), WordEncoder("words", 32)):
        with pytest.raises(RetrievalError, match=r"made by 'words', not by .* delete the folder"):
            ingest([docs], place, other)
    with pytest.raises(RetrievalError, match="holds no index"):
        open_index(tmp_path / "nowhere")


@pytest.mark.parametrize("terminal", [False, True])
def test_a_bar_shows_only_on_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, terminal: bool
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    with progress_bar("Embedding") as progress:
        DenseRetriever(CORPUS, WordEncoder(), progress=progress)
    assert ("5/5" in capsys.readouterr().err) == terminal


def test_an_index_keeps_documents_and_neighbours(tmp_path: Path) -> None:
    """Also of a text that is no passage of it; a text that is one is written once."""
    chunks = [Passage(f"chunk {i} " * 50, document="d", index=i) for i in range(9)]
    built = dense(*chunks, Passage("alone", before=("in front",)))
    assert [len(one.before) for one in built.passages] == [0, 1, 2, 3, 4, 5, 6, 7, 8, 1]
    built.save(tmp_path)
    assert DenseRetriever.load(tmp_path, WordEncoder()).passages == built.passages
    (file,) = (one for one in tmp_path.rglob("*") if one.is_file())
    assert file.read_bytes().count(b"chunk 0 chunk 0") == 25
