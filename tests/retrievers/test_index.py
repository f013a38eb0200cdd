"""The index on disk: documents come, change and go as a whole, whoever else reads or dies."""

from __future__ import annotations

import gc
import json
import os
import random
import resource
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import apsw
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from rag_windows import DocumentError, InputError, Passage, RetrievalError
from rag_windows_retrievers import (
    BM25Retriever,
    Changes,
    DenseRetriever,
    Document,
    Index,
    Progress,
    ingest,
    open_index,
    progress_bar,
    split_document,
)
from rag_windows_retrievers.in_memory import PROBE
from tests.retrievers.small import CORPUS, WordEncoder, ranking


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    folder = tmp_path / "docs"
    folder.mkdir()
    (folder / "halden.md").write_text("# Halden\n\nThe bridge was built in 1931.\n\nIt is old.")
    (folder / "notes.txt").write_text("Bakers sell bread. " * 30)
    (folder / "rows.jsonl").write_text('{"id": "z", "text": "Zürich has lakes."}\n')
    (folder / "logo.png").write_bytes(b"\x89PNG\x00")
    return folder


@pytest.fixture
def index(tmp_path: Path) -> Iterator[Index]:
    with Index(tmp_path / "index", root=tmp_path) as made:
        yield made


def write(path: Path, text: str) -> None:
    path.write_text(text)
    # As if it had been written long ago, each time at another moment.
    os.utime(path, ns=(0, random.getrandbits(40)))


def ids(index: Index) -> list[str]:
    return [one.id for one in index.documents()]


def test_it_ranks_as_the_list_in_memory_does(index: Index, tmp_path: Path) -> None:
    draw = random.Random(5)
    words = [f"w{number}" for number in range(60)] + ["The", "of", "US", "Zürich"]
    passages = [
        Passage(
            " ".join(draw.choices(words, k=draw.randint(1, 40))),
            id=str(number),
            title=draw.choice([None, "Old bridge"]),
        )
        for number in range(300)
    ]
    index.add_passages(passages)
    listed = BM25Retriever(passages)
    for _ in range(40):
        query = " ".join(draw.choices(words, k=draw.randint(1, 6)))
        for k in (1, 10, 400):
            assert ranking(index.retrieve(query, k)) == ranking(listed.retrieve(query, k))
    dense = Index(tmp_path / "dense", WordEncoder())
    dense.add_passages(passages)
    exact = DenseRetriever(passages, WordEncoder())
    for query in ("w1 w2 w3", "Zürich bridge", " "):
        assert ranking(dense.by_meaning.retrieve(query, 5)) == ranking(exact.retrieve(query, 5))
    # Of several paragraphs the list in memory gives the product with a shorter vector.
    several = "Zürich\n\nbridge"
    both = (one.retrieve(several, 5) for one in (dense.by_meaning, exact))
    assert len({tuple(one.id for one in found) for found in both}) == 1
    assert dense.retrieve("w1", 3)


def test_vectors_that_are_compared_by_their_products(tmp_path: Path) -> None:
    class Long(WordEncoder):
        def embed(
            self, texts: Sequence[str], *, query: bool, progress: Progress | None = None
        ) -> NDArray[np.float32]:
            made = super().embed(texts, query=query, progress=progress)
            return made * np.array([[1.0 + len(one)] for one in texts], dtype=np.float32)

    index = Index(tmp_path, Long())
    index.add_passages(CORPUS)
    exact = DenseRetriever(CORPUS, Long())
    assert ranking(index.by_meaning.retrieve("bridge", 4)) == ranking(exact.retrieve("bridge", 4))


def test_it_follows_the_files_and_embeds_only_what_is_new(docs: Path, tmp_path: Path) -> None:
    place, reported = tmp_path / "index", []
    made = ingest([docs], place, WordEncoder(), words=40, root=tmp_path)
    assert made.retrieve("When was the bridge built?", 1)[0].id == "docs/halden.md#1"
    moved = WordEncoder()
    moved.name = "/elsewhere/words"
    opened = open_index(place, moved)
    # Nothing but the probes is embedded again.
    assert tuple(moved.asked) == PROBE
    assert opened.passages == made.passages
    for query in ("lakes", "bread", "old bridge"):
        assert opened.retrieve(query) == made.retrieve(query)
    write(docs / "rows.jsonl", '{"id": "b", "text": "Bern has a river."}\n')
    later = ingest(
        [docs], place, WordEncoder(), words=40, progress=lambda *one: reported.append(one)
    )
    assert reported == [(1, 1)]
    assert "z" not in {one.id for one in later.retrieve("Zürich lakes")}
    assert later.retrieve("river", 1)[0].id == "b"
    for other in (WordEncoder("others"), WordEncoder("words", 32)):
        with pytest.raises(RetrievalError, match=r"made by 'words', not by .* delete the folder"):
            Index(place, other)
    with pytest.raises(InputError, match=r"have words=40, not words=7\. Use the same"):
        Index(place, words=7)
    with pytest.raises(RetrievalError, match="holds no index"):
        open_index(tmp_path / "nowhere")


def test_files_come_change_and_go(docs: Path, index: Index) -> None:
    first = index.follow(docs)
    assert first.added == ("docs/halden.md", "docs/notes.txt", "z")
    assert [one.label for one in first.skipped] == ["docs/logo.png"]
    before = index.version
    assert index.follow(docs).unchanged == 3
    write(docs / "halden.md", "# Halden\n\nThe bridge was built in 1933.")
    assert index.follow(docs) == Changes(
        replaced=("docs/halden.md",), unchanged=2, skipped=first.skipped
    )
    assert "1933" in index.retrieve("bridge")[0].text
    assert index.stale_since(before) == (index.version, ["docs/halden.md"])
    # Written anew with the same words.
    write(docs / "halden.md", "# Halden\n\nThe bridge was built in 1933.")
    assert not index.follow(docs)
    (docs / "notes.txt").unlink()
    assert index.follow(docs).removed == ("docs/notes.txt",)
    assert index.retrieve("bread") == []
    write(docs / "rows.jsonl", '{"id": "z", "text": "Zürich has lakes."}\n{"text": "New."}\n')
    assert index.follow(docs).added == ("docs/rows.jsonl:2",)


def test_a_file_that_cannot_be_read_any_more_is_reported_and_not_answered_from(
    docs: Path, index: Index
) -> None:
    index.follow(docs)
    (docs / "halden.md").write_bytes(b"caf\xe9 " * 20)
    changes = index.follow(docs)
    assert changes.removed == ("docs/halden.md",)
    assert "docs/halden.md:1" in [one.label for one in changes.skipped if one.problem]
    assert index.retrieve("bridge") == []
    assert [one.label for one in index.skipped()] == ["docs/halden.md:1"]
    assert [one.label for one in index.follow(docs).skipped if one.problem] == ["docs/halden.md:1"]
    with pytest.raises(DocumentError, match=r"halden\.md:1: not valid UTF-8"):
        index.follow(docs, strict=True)
    write(docs / "halden.md", "Halden has a bridge.")
    assert index.follow(docs, strict=True).added == ("docs/halden.md",)
    assert index.skipped() == []


def _without_a_package(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    monkeypatch.setitem(sys.modules, "lxml", None)


def _without_a_permission(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    def read(one: Path) -> bytes:
        if one == path:
            raise PermissionError(13, "Permission denied")
        return original(one)

    original = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", read)


@pytest.mark.parametrize(
    ("hinder", "reason"),
    [(_without_a_package, "needs lxml"), (_without_a_permission, "Permission denied")],
)
def test_a_file_is_read_as_soon_as_nothing_around_it_hinders(
    docs: Path,
    index: Index,
    monkeypatch: pytest.MonkeyPatch,
    hinder: Callable[[pytest.MonkeyPatch, Path], None],
    reason: str,
) -> None:
    page = docs / "page.html"
    write(page, "<p>The ferry sails at six.")
    with monkeypatch.context() as patched:
        hinder(patched, page)
        for _ in range(2):
            (bad,) = [one for one in index.follow(docs).skipped if one.problem]
            assert reason in bad.reason
            assert bad in index.skipped()
        with pytest.raises(DocumentError, match=reason):
            index.follow(docs, strict=True)
    assert index.follow(docs, strict=True).added == ("docs/page.html",)
    assert index.skipped() == []
    assert index.follow(docs).unchanged == 4


def test_a_damaged_file_is_not_read_again_and_again(
    docs: Path, index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    (docs / "scan.pdf").write_bytes(b"%PDF-1.4 no more")
    for path in docs.iterdir():
        os.utime(path, ns=(0, 1))
    first = index.follow(docs).skipped
    monkeypatch.delattr(Path, "read_bytes")
    assert index.follow(docs).skipped == first


@pytest.mark.parametrize("name", ["docs/halden.md", "docs/rows.jsonl", "z"])
def test_what_was_removed_stays_out_until_it_is_asked_for(
    docs: Path, index: Index, name: str
) -> None:
    index.follow(docs)
    removed = index.remove(name).removed
    assert len(removed) == 1
    assert removed[0] not in ids(index)
    assert not index.follow(docs)
    for path in docs.iterdir():
        os.utime(path, ns=(0, 1))
    assert not index.follow(docs)
    assert index.follow(docs, again=True).added == removed
    assert not index.follow(docs)
    assert index.remove("nothing of this name") == Changes()


def test_documents_of_other_paths_stay(docs: Path, index: Index, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "a.txt").write_text("Oslo has a fjord.")
    index.follow(docs)
    index.follow([other])
    index.add(Document("Added by hand.", "by hand", title="Hand"))
    (docs / "notes.txt").unlink()
    index.follow(docs)
    assert ids(index) == ["docs/halden.md", "z", "other/a.txt", "by hand"]
    assert index.roots() == [str(docs), str(other)]
    (found,) = index.documents("by hand")
    assert (found.source, found.title, found.passages) == (None, "Hand", 1)
    assert abs(found.added - time.time()) < 60


def test_a_document_takes_the_place_of_the_old_one(index: Index) -> None:
    old, new = (
        Document(f"{word} stands here. " * 200, "d", title="T") for word in ("Alpha", "Beta")
    )
    assert index.add(old).added == ("d",)
    assert index.add(old) == Changes(unchanged=1)
    assert index.add([new]).replaced == ("d",)
    assert index.retrieve("alpha") == []
    expected = split_document(new)
    assert index.passages_of(["d"]) == index.passages == expected
    assert len(expected) > 2
    assert expected[-1].before
    assert index.named([expected[1].id or ""]) == expected[1:2]
    found = index.retrieve("beta", 50)
    assert {one.id for one in found} <= {one.id for one in expected}


def test_passages_as_they_are(index: Index) -> None:
    chunk = Passage("second", id="c/2", document="c", index=1, before=("first",))
    odd = Passage(
        "a\u2028and\x85 lines\r\n", "a\nb", 'quo"te', metadata={"": [1], "ü": {"x": None}}
    )
    assert index.add_passages([chunk, odd, Passage("", id="blank")]).added == ("c", "a\nb", "blank")
    assert index.named(["a\nb", "c/2", "blank"]) == (odd, chunk, Passage("", id="blank"))
    changed = Passage("third", id="c/2", document="c", index=1)
    assert index.add_passages([changed]) == Changes(replaced=("c",))
    assert index.passages_of(["c"]) == (changed,)
    assert index.remove_passages(["c/2"]).removed == ("c",)
    assert ids(index) == ["a\nb", "blank"]
    refused = [
        (Passage("no id"), "needs an id"),
        (Passage("x", id="x", metadata={"k": object()}), "metadata can't be saved as JSON"),
        (Passage("half \ud800", id="x"), "half a character"),
    ]
    for passage, why in refused:
        with pytest.raises(InputError, match=why):
            index.add_passages([Passage("whole", id="w"), passage])
    assert ids(index) == ["a\nb", "blank"]


def test_removed_text_is_nowhere_in_the_files(tmp_path: Path) -> None:
    index = Index(tmp_path, WordEncoder())
    index.add([Document(f"common words {number}", f"d{number}") for number in range(300)])
    secret = Document("The zebracorn ate 8271 quinces.", "secret", title="Xylograph")
    index.add(secret)
    vector = WordEncoder().embed(["Xylograph\n" + secret.text], query=False).tobytes()
    traces = (b"zebracorn", b"Xylograph", b"quinces", vector)

    def found() -> list[bool]:
        data = b"".join(one.read_bytes() for one in tmp_path.iterdir())
        return [one in data for one in traces]

    assert all(found())
    index.remove("secret")
    assert not any(found())
    assert index.by_meaning.retrieve("zebracorn quinces", 1)[0].id != "secret#1"


def test_passages_added_without_a_model_are_embedded_later(tmp_path: Path) -> None:
    with Index(tmp_path) as plain:
        plain.add_passages(CORPUS)
    encoder = WordEncoder()
    opened = Index(tmp_path, encoder)
    assert len(encoder.asked) == len(PROBE) + len(CORPUS)
    with Index(tmp_path) as plain:
        plain.add(Document("Oslo has a fjord.", "oslo"))
    assert opened.by_meaning.retrieve("fjord", 1)[0].id != "oslo#1"
    assert opened.by_words.retrieve("fjord", 1)[0].id == "oslo#1"
    opened.complete()
    assert opened.by_meaning.retrieve("fjord", 1)[0].id == "oslo#1"
    with pytest.raises(InputError, match="without an embedding model"):
        _ = plain.by_meaning


@pytest.mark.slow
def test_a_snapshot_sees_one_moment(index: Index) -> None:
    index.add(Document("Alpha is here.", "a"))
    with index.snapshot(), ThreadPoolExecutor(1) as other:
        assert other.submit(index.remove, "a").result().removed == ("a",)
        assert other.submit(index.retrieve, "alpha").result() == []
        assert [one.id for one in index.retrieve("alpha")] == ["a#1"]
    assert index.retrieve("alpha") == []


def test_readers_and_writers_see_whole_documents(index: Index) -> None:
    """Each document says one letter in all of its passages, and changes all the time."""
    ended, letters = threading.Event(), "abcdefgh"
    index.add([Document(f"{letters[0] * 3} word. " * 200, f"d{n}") for n in range(3)])

    def read() -> int:
        count = 0
        while not ended.is_set():
            for n in range(3):
                found = index.passages_of([f"d{n}"])
                assert len({one.text[:3] for one in found}) == 1
                assert len(found) == 4
            count += 1
        return count

    def change(number: int) -> None:
        for letter in letters[1:]:
            index.add(Document(f"{letter * 3} word. " * 200, f"d{number}"))

    with ThreadPoolExecutor(6) as pool:
        readers = [pool.submit(read) for _ in range(3)]
        try:
            for writer in [pool.submit(change, number) for number in range(3)]:
                writer.result()
        finally:
            ended.set()
        assert all(one.result() for one in readers)
    assert index.version == 1 + 3 * 7


CHILD = """
import sys
from rag_windows_retrievers import Document, Index
index = Index(sys.argv[1])
print("begun", flush=True)
for number in range(int(sys.argv[2]), 1000, 5):
    index.add([
        Document(f"document {one} says the same in every passage. " * 40, f"d{one}")
        for one in range(number, number + 5)
    ])
"""


@pytest.mark.slow
def test_a_process_that_is_killed_leaves_whole_documents(tmp_path: Path) -> None:
    whole = len(split_document(Document("document 1 says the same in every passage. " * 40, "d")))
    seen = 0
    for pause in (0.0, 0.05, 0.15, 0.3):
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(tmp_path), str(seen)], stdout=subprocess.PIPE
        )
        assert child.stdout is not None
        child.stdout.readline()
        time.sleep(pause)
        child.kill()
        child.communicate()
        with Index(tmp_path) as index:
            documents = index.documents()
            assert [one.id for one in documents] == [f"d{n}" for n in range(len(documents))]
            assert {one.passages for one in documents} <= {whole}
            assert len(documents) % 5 == 0
            assert len(documents) >= seen
            if documents:
                assert index.retrieve(f"document {len(documents) - 1}", 1)
            seen = len(documents)
    assert seen


@pytest.mark.slow
def test_a_full_disk_loses_nothing(tmp_path: Path) -> None:
    """Files of a child may not grow beyond a bound, which is an error of writing as a full disk."""
    code = f"""
        import resource, signal, sys
        from rag_windows import RetrievalError
        from rag_windows_retrievers import Document, Index
        index = Index({str(tmp_path)!r})
        index.add(Document("Alpha is here.", "a"))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, {resource.RLIM_INFINITY}))
        try:
            index.add([Document(f"{{n}} word " * 2000, str(n)) for n in range(20)])
        except RetrievalError as error:
            print(error)
        resource.setrlimit(resource.RLIMIT_FSIZE, ({resource.RLIM_INFINITY},) * 2)
        print([one.id for one in index.documents()], index.retrieve("alpha")[0].id)
        print(index.add(Document("Beta is here.", "b")).added)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True
    )
    failed, after, added = done.stdout.splitlines()
    assert "can't be" in failed
    assert "free space" in failed or "disk is full" in failed
    assert (after, added) == ("['a'] a#1", "('b',)")


def test_damage_is_reported_with_what_to_do(tmp_path: Path) -> None:
    with Index(tmp_path) as index:
        index.add(Document("Alpha is here.", "a"))
    file = tmp_path / "index.sqlite"
    data = file.read_bytes()
    for damaged in (b"no database" * 500, data[:5000] + os.urandom(len(data) - 5000)):
        for leftover in tmp_path.glob("index.sqlite-*"):
            leftover.unlink()
        file.write_bytes(damaged)
        with pytest.raises(RetrievalError, match=r"index\.sqlite (is damaged|can't be used)"):
            Index(tmp_path).retrieve("alpha")
    file.unlink()
    assert len(Index(tmp_path)) == 0


def test_an_index_of_another_version_is_refused(tmp_path: Path) -> None:
    import apsw

    Index(tmp_path).close()
    connection = apsw.Connection(str(tmp_path / "index.sqlite"))
    connection.execute("UPDATE settings SET value = '9' WHERE name = 'format'")
    connection.close()
    with pytest.raises(RetrievalError, match="has the format 9, and this version reads 1"):
        Index(tmp_path)


def test_words_are_split_again_after_an_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Index(tmp_path) as index:
        index.add(Document("The bridges of Halden.", "a"))
        assert index.retrieve("bridge") == []
    inside = "rag_windows_retrievers.index"
    monkeypatch.setattr(f"{inside}.VERSION", "2")
    for place in (f"{inside}_tables", f"{inside}_ranking"):
        split = f"{place}.tokenize"
        monkeypatch.setattr(split, lambda text: [word.rstrip("s.") for word in text.split()])
    with Index(tmp_path) as index:
        assert [one.id for one in index.retrieve("bridge")] == ["a#1"]


def test_who_missed_too_much_is_told_so(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rag_windows_retrievers.index_tables.REMEMBERED", 3)
    for number in range(6):
        index.add(Document("Text.", f"d{number}"))
    versions = []
    for number in range(6):
        versions.append(index.version)
        index.remove(f"d{number}")
    assert index.stale_since(versions[-3]) == (index.version, ["d3", "d4", "d5"])
    assert index.stale_since(versions[0]) == (index.version, None)


def test_an_unwritable_folder_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RetrievalError, match=r"can't be written: Not a directory\. Check the"):
        Index(tmp_path / "file" / "index")


def test_a_forked_child_has_connections_of_its_own(index: Index) -> None:
    index.add(Document("Alpha is here.", "a"))
    child = os.fork()
    if not child:
        found = index.retrieve("alpha")
        os._exit(0 if [one.id for one in found] == ["a#1"] else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert index.retrieve("alpha")


def test_an_index_that_nobody_has_any_more_holds_no_file_open(tmp_path: Path) -> None:
    def open_files() -> list[str]:
        return [one.filename for one in apsw.connections() if str(tmp_path) in one.filename]

    index = Index(tmp_path)
    index.add(Document("Alpha is here.", "a"))
    assert open_files()
    child = os.fork()
    if not child:
        # The parent's, which still reads.
        del index
        gc.collect()
        os._exit(0 if open_files() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert index.retrieve("alpha")
    del index
    gc.collect()
    assert open_files() == []


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
STEP = st.one_of(
    st.tuples(st.just("add"), st.sampled_from("abc"), TEXTS),
    st.tuples(st.just("remove"), st.sampled_from("abc"), st.just("")),
)


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(steps=st.lists(STEP, max_size=12))
def test_whatever_comes_and_goes_it_equals_a_new_index(
    steps: list[tuple[str, str, str]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    index = Index(tmp_path_factory.mktemp("lived"))
    left: dict[str, Document] = {}
    for kind, name, text in steps:
        if kind == "add":
            left[name] = Document(text, name)
            index.add(left[name])
        elif left.pop(name, None) is not None:
            index.remove(name)
    new = Index(tmp_path_factory.mktemp("new"))
    new.add(left.values())
    assert sorted(ids(index)) == sorted(left)
    assert sorted(map(repr, index.passages)) == sorted(map(repr, new.passages))
    for query in ("a", "the of", *(one.text for one in left.values())):
        both = [sorted(ranking_of(one, query)) for one in (index, new)]
        assert both[0] == pytest.approx(both[1])


def ranking_of(index: Index, query: str) -> list[float]:
    return [one.score or 0.0 for one in index.retrieve(query, 50)]


@pytest.mark.parametrize("terminal", [False, True])
def test_a_bar_shows_only_on_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, terminal: bool
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    with progress_bar("Embedding") as progress:
        DenseRetriever(CORPUS, WordEncoder(), progress=progress)
    assert ("5/5" in capsys.readouterr().err) == terminal


def test_a_file_name_that_is_no_text_stops_nobody(docs: Path, index: Index) -> None:
    Path(os.fsdecode(os.fsencode(docs) + b"/\xff.txt")).write_text("The ferry leaves at nine.")
    assert "docs/\ufffd.txt" in index.follow(docs).added
    assert index.retrieve("ferry")[0].title == "\ufffd"
    assert index.retrieve("bridge")


@pytest.mark.parametrize("name", ["docs/halden.md", "z", "docs/rows.jsonl"])
def test_what_is_removed_while_it_is_read_stays_out(docs: Path, tmp_path: Path, name: str) -> None:
    class Slow(WordEncoder):
        def embed(
            self, texts: Sequence[str], *, query: bool, progress: Progress | None = None
        ) -> NDArray[np.float32]:
            if not query and any("bridge" in one for one in texts):
                other.remove(name)
            return super().embed(texts, query=query, progress=progress)

    other = Index(tmp_path / "index", root=tmp_path)
    other.follow(docs)
    known = {one.id for one in other.documents() if name in (one.id, one.source)}
    for path in docs.iterdir():
        if path.suffix in (".md", ".jsonl"):
            path.write_text(path.read_text().replace("has", "have").replace("1931", "1932"))
    index = Index(tmp_path / "index", Slow(), root=tmp_path)
    other.remove("nothing")
    index.follow(docs)
    for again in (False, False):
        index.follow(docs, again=again)
        assert not known & {*ids(index)}
    assert known <= {*index.follow(docs, again=True).added}


def test_a_sent_document_takes_the_place_of_a_file_s_for_good(docs: Path, index: Index) -> None:
    index.follow(docs)
    assert index.add(Document("Zürich has trams.", "z", named=True)).replaced == ("z",)
    write(docs / "rows.jsonl", '{"id": "z", "text": "Old."}\n{"id": "y", "text": "New."}\n')
    assert index.follow(docs).added == ("y",)
    assert "trams" in index.passages_of(["z"])[0].text
    index.remove("z")
    write(docs / "rows.jsonl", '{"id": "z", "text": "Older."}\n{"id": "y", "text": "Newer."}\n')
    index.follow(docs)
    assert "z" not in ids(index)


def test_a_file_that_comes_after_a_sent_one_of_its_name_is_taken(docs: Path, index: Index) -> None:
    index.add(Document("Sent.", "docs/late.txt"), source="docs/late.txt")
    index.remove("docs/late.txt")
    write(docs / "late.txt", "Late.")
    assert "docs/late.txt" in index.follow(docs).added


def test_pages_hold_every_id(index: Index, docs: Path) -> None:
    rows = [{"id": one, "text": f"Text of {one}, row {at}."} for at, one in enumerate("ABCA")]
    write(docs / "rows.jsonl", "\n".join(map(json.dumps, rows)))
    index.follow(docs)
    listed: list[str] = []
    while found := index.documents(after=listed[-1] if listed else None, limit=1):
        listed += [one.id for one in found]
    assert sorted(listed) == ["A", "B", "C", "docs/halden.md", "docs/notes.txt"]
    with pytest.raises(InputError, match="not an empty one"):
        index.sources(below=" ")
