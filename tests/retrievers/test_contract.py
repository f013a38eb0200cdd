"""What every retriever promises; see `Retriever`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rag_windows import InputError, Passage
from rag_windows_retrievers import BM25Retriever, HybridRetriever, Retriever
from tests.retrievers.small import CORPUS, MADE, ranking


@pytest.fixture(params=MADE)
def retriever(request: pytest.FixtureRequest, tmp_path: Path) -> Retriever:
    return MADE[request.param](tmp_path, CORPUS)


def test_the_best_come_first_and_as_they_were_given(retriever: Retriever) -> None:
    assert isinstance(retriever, Retriever)
    found = retriever.retrieve("old bridge of stone", 3)
    assert 1 < len(found) <= 3
    scores = [one.score for one in found]
    assert all(score is not None and math.isfinite(score) for score in scores)
    assert scores == sorted(scores, key=lambda score: -(score or 0.0))
    given = list(CORPUS)
    for one in found:
        assert type(one) is Passage
        given.remove(dataclasses.replace(one, score=None))
    assert all(one.score is None for one in CORPUS)


def test_no_more_than_asked_for(retriever: Retriever) -> None:
    assert len(retriever.retrieve("old bridge", 1)) == 1
    assert len(retriever.retrieve("old bridge", 10_000)) <= len(CORPUS)
    with pytest.raises(InputError, match="k must be at least 1, not 0"):
        retriever.retrieve("old bridge", 0)
    assert retriever.retrieve("") == retriever.retrieve(" \n") == []


def test_threads_share_it(retriever: Retriever) -> None:
    queries = ["old bridge", "bread in the morning", "Halden " * 40, "lakes"] * 6
    expected = [retriever.retrieve(query, 3) for query in queries[:4]] * 6
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda query: retriever.retrieve(query, 3), queries))
    for one, other in zip(found, expected, strict=True):
        assert ranking(one) == [(passage.id, passage.score) for passage in other]


COPIES = [
    *(Passage("The bridge of Halden is old.", title="Halden", id=f"copy {i}") for i in range(8)),
    Passage("The bridge of Halden is old.", title="Another", id="other title"),
    Passage("A stone bridge.", id="stone"),
    Passage("The bridge was built in 1931.", id="built"),
]
IN_TWO = HybridRetriever([BM25Retriever(COPIES[:4]), BM25Retriever(COPIES[4:])])


@pytest.mark.parametrize("made", [*MADE.values(), lambda *_: IN_TWO], ids=[*MADE, "in two"])
def test_copies_take_one_place(made: Callable[..., Retriever], tmp_path: Path) -> None:
    one = made(tmp_path, COPIES)
    ids = sorted(str(hit.id) for hit in one.retrieve("old bridge of Halden", 8))
    assert ids == ["built", "copy 0", "other title", "stone"]
    assert len(one.retrieve("old bridge of Halden", 3)) == 3
