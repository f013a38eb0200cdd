"""Which passages a question is read with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rag_windows import InputError, Passage
from rag_windows.evaluation import run
from tests.rag_windows.evaluation.invented import invented
from tests.retrievers.small import CORPUS, WordEncoder

TASK = replace(invented(), pool=CORPUS)


def example(*said: str, **details: Any) -> Any:
    roles = ["user", "assistant"] * len(said)
    messages = tuple({"role": r, "content": c} for r, c in zip(roles, said, strict=False))
    return replace(TASK.examples[0], messages=messages, details=details)


def ids(passages: Sequence[Passage] | None) -> list[str | None]:
    return [one.id for one in passages or ()]


def test_the_conversation_is_the_query_without_a_styles_wording(tmp_path: Path) -> None:
    search = run.Search("bm25", 1)
    ranker = search.over(TASK, tmp_path)
    assert ids(ranker(example("When was it?"))) == ["bridge"]
    assert ids(ranker(example("Is there a harbour?", "Yes.", "Behind what?"))) == ["harbour"]
    bare = [{"role": "user", "content": "Who sells bread?"}]
    assert ids(ranker(example("Answer over lakes: bread?", conversation=bare))) == ["bread"]
    query = {"turns": 3, "weight": 3}
    assert search.settings == {"retriever": "bm25", "depth": 1, "query": query}


def test_given_passages_keep_their_order(tmp_path: Path) -> None:
    asked = TASK.examples[1]
    for depth in (None, 2):
        ranker = run.Search("given", depth).over(TASK, tmp_path)
        assert ids(ranker(asked)) == ids(asked.passages)[:depth]


@pytest.mark.parametrize("kind", ["dense", "hybrid"])
def test_vectors_are_kept_and_embedded_once(tmp_path: Path, kind: Any) -> None:
    first, again, asked = WordEncoder(), WordEncoder(), example("bakers sell bread")
    ranker = run.Search(kind, 2, first).over(TASK, tmp_path / "index")
    second = run.Search(kind, 2, again)
    assert ids(second.over(TASK, tmp_path / "index")(asked)) == ids(ranker(asked))
    assert len(first.asked) >= len(CORPUS) > len(again.asked)
    assert ids(ranker(asked))[0] == "bread"
    assert second.settings["embedder"] == "words"


def test_an_embedder_goes_with_dense_search() -> None:
    with pytest.raises(InputError, match="dense: dense and hybrid need --embedder"):
        run.Search("dense")
    with pytest.raises(InputError, match="bm25: dense and hybrid need"):
        run.Search("bm25", embedder="x")
