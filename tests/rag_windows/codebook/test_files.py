"""A book in a folder: other processes and threads, damage, and what it was made with."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rag_windows import APE, CacheError, Codebook, DeepThinking, InputError, Passage, WindowedLM
from tests.rag_windows import small
from tests.rag_windows.codebook.books import METHOD, PASSAGES, QUESTION, TOPICS, book, entries


def answer(path: Path) -> tuple[int, ...]:
    with book(path) as held:
        return small.lm().generate(QUESTION, held, max_new_tokens=4).token_ids


def test_it_outlasts_its_process(tmp_path: Path) -> None:
    metadata = {"pages": [1, 2], "ü": None}
    odd = Passage("odd \x00\u2028 text", id="odd", title="Title", score=0.5, metadata=metadata)
    with book(tmp_path) as held:
        held.add([*PASSAGES, odd])
        first = held.search(QUESTION)
        out = small.lm().generate(QUESTION, held, max_new_tokens=4)
    told: list[tuple[int, int]] = []
    again = book(tmp_path, on_loaded=lambda done, total: told.append((done, total)))
    assert told == [(8, 8)]
    assert again.ids == (*TOPICS, "odd")
    assert again["odd"] == odd
    assert again.search(QUESTION) == first
    assert small.lm().generate(QUESTION, again, max_new_tokens=4).token_ids == out.token_ids
    # Nothing but the query was encoded: prefix and windows come from the disk.
    assert again.cache.stats().misses == 0
    assert again.cache.stats().hits > 3


def test_counts_are_kept(tmp_path: Path) -> None:
    with book(tmp_path, replace(METHOD, size=3, retrieve=1)) as held:
        held.add(PASSAGES[:3])
        for _ in range(2):
            found = held.search(QUESTION)[0].passage.id
    with book(tmp_path, replace(METHOD, size=3, retrieve=1)) as held:
        assert held.add(PASSAGES[3:5]).evicted == tuple(
            topic for topic in TOPICS[:3] if topic != found
        )


def test_removed_passages_leave_no_file(tmp_path: Path) -> None:
    with book(tmp_path) as held:
        held.add([*PASSAGES, Passage(PASSAGES[0].text, id="the same again")])
        files = len(entries(tmp_path))
        held.remove("cats")
        assert len(entries(tmp_path)) == files
        held.remove("the same again")
        held.cache.flush()
        assert len(entries(tmp_path)) == files - 2
        held.clear()
        assert len(entries(tmp_path)) <= 1  # the prefix
        assert len(held) == 0
    assert "cats" not in (tmp_path / "book.json").read_text()


@pytest.mark.parametrize("damage", ["a byte", "cut", "gone"])
def test_damaged_entries_are_encoded_again(tmp_path: Path, damage: str) -> None:
    with book(tmp_path) as held:
        held.add(PASSAGES)
    right = answer(tmp_path)
    for file in entries(tmp_path):
        data = bytearray(file.read_bytes())
        if damage == "a byte":
            data[-3] ^= 64
        file.unlink() if damage == "gone" else file.write_bytes(
            data[: len(data) - 9 * (damage == "cut")]
        )
    assert answer(tmp_path) == right
    with book(tmp_path) as held:
        held.cache.verify()
        assert held.ids == TOPICS


def test_a_damaged_index_is_an_error(tmp_path: Path) -> None:
    with book(tmp_path) as held:
        held.add(PASSAGES[:1])
    file = tmp_path / "book.json"
    text = file.read_text()
    edited = text.replace("about cats", "about rats")
    for damaged in (text[: len(text) // 2], edited, "[]", '{"seal": "", "book": {}}'):
        file.write_text(damaged)
        with pytest.raises(CacheError, match="damaged"):
            book(tmp_path)


def test_what_a_book_was_made_with_is_checked(tmp_path: Path) -> None:
    with book(tmp_path) as held:
        held.add(PASSAGES[:2])
    lm, tokenizer = small.lm(), deepcopy(small.tokenizer())
    tokenizer.chat_template = small.TEMPLATE + " "
    with pytest.raises(CacheError, match="another prefix"):
        book(tmp_path, prefix="Be brief.")
    with pytest.raises(CacheError, match="another encoding"):
        lm.codebook(Codebook(reader=DeepThinking(2)), path=tmp_path)
    with pytest.raises(CacheError, match="another model"):
        WindowedLM(small.model(1), small.tokenizer()).codebook(METHOD, path=tmp_path)
    with pytest.raises(CacheError, match="another tokenizer"):
        WindowedLM(small.model(), tokenizer).codebook(METHOD, path=tmp_path)
    # How windows are read and searched is free.
    for method in (Codebook(reader=APE(0.5)), Codebook(page=1, similarity="dot", fusion="mean")):
        with lm.codebook(method, path=tmp_path) as held:
            assert len(held.search(QUESTION)) == 2


def test_weights_that_change_below_it_are_noticed() -> None:
    model = deepcopy(small.model())
    lm = WindowedLM(model, small.tokenizer())
    held = lm.codebook(METHOD)
    held.add(PASSAGES[:2])
    with torch.no_grad():
        next(model.parameters()).mul_(1.5)
    with pytest.raises(CacheError, match="another model"):
        held.search(QUESTION)


def test_refined_windows_are_kept_refined(tmp_path: Path) -> None:
    method = Codebook(retrieve=2, reader=DeepThinking(2, eta=0.5))
    with book(tmp_path, method) as held:
        held.add(PASSAGES)
    with book(tmp_path, method) as held:
        kept = small.lm().generate(QUESTION, held, max_new_tokens=4)
        assert held.cache.stats().misses == 0
    given = small.lm().generate(QUESTION, PASSAGES, method=method, max_new_tokens=4)
    assert kept.token_ids == given.token_ids


@pytest.mark.parametrize("id", ["../../up", "/etc/passwd", "a\x00b", "\ud800", "x" * 5000])
def test_hostile_ids_name_no_files(tmp_path: Path, id: str) -> None:
    folder = tmp_path / "book"
    with book(folder) as held:
        held.add([Passage("some text", id=id)])
    assert [file.name for file in tmp_path.iterdir()] == ["book"]
    assert {file.name for file in folder.iterdir()} == {"book.json", "windows"}
    assert len(entries(folder)) == 3  # prefix, window, pages
    assert book(folder)[id].text == "some text"


def test_metadata_that_no_file_can_hold(tmp_path: Path) -> None:
    with book(tmp_path) as held:
        for value in (object(), (1, 2), {1: 2}, float("nan")):
            with pytest.raises(InputError, match="metadata"):
                held.add([Passage("text", id="a", metadata={"key": value})])
        assert len(held) == 0
    assert book().add([Passage("text", id="a", metadata={"key": object()})]).ids == ("a",)


def test_an_index_that_can_not_be_written_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with book(tmp_path) as held:
        held.add(PASSAGES[:2])

        def full(*_: object) -> int:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patched:
            patched.setattr("rag_windows.codebook.index.os.fsync", full)
            with pytest.raises(CacheError, match="No space"):
                held.add(PASSAGES[2:])
        assert held.ids == TOPICS[:2]
        assert json.loads((tmp_path / "book.json").read_text())["book"]["format"] == 1
        held.add(PASSAGES[2:])
        assert held.ids == book(tmp_path).ids == TOPICS
    assert not list(tmp_path.glob("*.tmp"))


ROUNDS = 4


def test_add_remove_and_ask_at_once(tmp_path: Path) -> None:
    lm = small.lm()
    with book(tmp_path) as held:
        held.add(PASSAGES)
        begin = threading.Barrier(4)

        def change(name: str) -> None:
            begin.wait()
            for turn in range(ROUNDS):
                ids = [f"{name} {turn} {index}" for index in range(2)]
                held.add([Passage(f"{one} is of no interest", id=one) for one in ids])
                held.remove(ids[:1])

        def ask(_: str) -> None:
            begin.wait()
            for _turn in range(ROUNDS):
                out = lm.generate(QUESTION, held, max_new_tokens=2)
                found = [citation.id for citation in out.citations or ()]
                assert len(found) == len(set(found)) == 3

        with ThreadPoolExecutor(4) as pool:
            jobs = [pool.submit(work, name) for work in (change, ask) for name in ("one", "two")]
            for job in jobs:
                job.result(timeout=120)
        kept = {f"{name} {turn} 1" for name in ("one", "two") for turn in range(ROUNDS)}
        assert set(held.ids) == kept | set(TOPICS)
        found = held.search(QUESTION, 99)
        assert {one.passage.id for one in found} == set(held.ids)
    assert book(tmp_path).search(QUESTION, 99) == found


def test_equally_similar_passages_come_in_their_order() -> None:
    held = book()
    held.add([Passage("the same text", id=name) for name in "dacb"])
    assert [one.passage.id for one in held.search(QUESTION, 3)] == ["d", "a", "c"]


def test_two_books_of_one_folder_lose_nothing(tmp_path: Path) -> None:
    """As two processes do it: nothing but the files is common to them."""
    books = [book(tmp_path), book(tmp_path)]
    begin = threading.Barrier(2)

    def fill(number: int) -> None:
        begin.wait()
        for turn in range(5):
            one = f"{number} {turn}"
            books[number].add([Passage(f"passage {one}", id=one)])

    with ThreadPoolExecutor(2) as pool:
        for job in [pool.submit(fill, number) for number in range(2)]:
            job.result(timeout=120)
    expected = {f"{number} {turn}" for number in range(2) for turn in range(5)}
    assert set(books[0].ids) == set(books[1].ids) == set(book(tmp_path).ids) == expected
    books[0].update([Passage("dogs bark", id="0 0")])
    assert books[1]["0 0"].text == "dogs bark"
    assert books[0].search(QUESTION) == books[1].search(QUESTION)
