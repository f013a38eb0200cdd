"""A book that several threads add to, remove from and ask at once."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rag_windows import Passage
from tests.rag_windows import small
from tests.rag_windows.codebook.books import PASSAGES, QUESTION, TOPICS, book

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

        def ask() -> None:
            begin.wait()
            for _ in range(ROUNDS):
                out = lm.generate(QUESTION, held, max_new_tokens=2)
                found = [citation.id for citation in out.citations or ()]
                assert len(found) == len(set(found)) == 3
                read = [one.passage for one in held.search(QUESTION)]
                assert all(held[str(one.id)] == one for one in read if one.id in TOPICS)

        with ThreadPoolExecutor(4) as pool:
            jobs = [pool.submit(change, "one"), pool.submit(change, "two")]
            jobs += [pool.submit(ask), pool.submit(ask)]
            for job in jobs:
                job.result(timeout=120)
        kept = {f"{name} {turn} 1" for name in ("one", "two") for turn in range(ROUNDS)}
        assert set(held.ids) == kept | set(TOPICS)
        found = held.search(QUESTION, 99)
        assert {one.passage.id for one in found} == set(held.ids)
    assert book(tmp_path).search(QUESTION, 99) == found


def test_many_changes_leave_what_a_fresh_book_of_the_same_passages_has() -> None:
    held = book()
    plain: dict[str, Passage] = {}
    for turn in range(12):
        new = [Passage(f"{turn} of {number} " * number, id=f"{turn}-{number}") for number in (1, 2)]
        held.add(new)
        plain |= {str(one.id): one for one in new}
        if turn % 3 == 2:
            gone = list(plain)[:: turn // 2]
            held.remove(gone)
            plain = {name: one for name, one in plain.items() if name not in gone}
    fresh = book()
    fresh.add(plain.values())
    assert held.ids == tuple(plain)
    assert held.search(QUESTION, 99) == fresh.search(QUESTION, 99)


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
