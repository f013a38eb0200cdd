"""Which passages a question is read with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rag_windows import InputError, MissingExtraError, Passage
from rag_windows.evaluation import retrieval
from tests.rag_windows.evaluation.invented import invented
from tests.retrievers.small import CORPUS, WordEncoder

TASK = replace(invented(), pool=CORPUS)


def example(*said: str, **details: Any) -> Any:
    roles = ["user", "assistant"] * len(said)
    messages = tuple({"role": r, "content": c} for r, c in zip(roles, said, strict=False))
    return replace(TASK.examples[0], messages=messages, details=details)


def ids(passages: Sequence[Passage] | None) -> list[str | None]:
    return [one.id for one in passages or ()]


def test_the_conversation_is_the_query_without_a_styles_wording() -> None:
    ranker = retrieval.Ranker(TASK, "bm25", 1)
    assert ids(ranker(example("When was it?"))) == ["bridge"]
    assert ids(ranker(example("Is there a harbour?", "Yes.", "Behind what?"))) == ["harbour"]
    bare = [{"role": "user", "content": "Who sells bread?"}]
    assert ids(ranker(example("Answer over lakes: bread?", conversation=bare))) == ["bread"]
    query = {"turns": 3, "weight": 3}
    assert ranker.settings == {"retriever": "bm25", "depth": 1, "query": query}


def test_given_passages_keep_their_order() -> None:
    asked = TASK.examples[1]
    assert ids(retrieval.Ranker(TASK, "given", None)(asked)) == ids(asked.passages)
    assert ids(retrieval.Ranker(TASK, "given", 2)(asked)) == ids(asked.passages)[:2]


@pytest.mark.parametrize("kind", ["dense", "hybrid"])
def test_vectors_are_kept_and_embedded_once(tmp_path: Path, kind: Any) -> None:
    first, again, asked = WordEncoder(), WordEncoder(), example("bakers sell bread")
    ranker = retrieval.Ranker(TASK, kind, 2, embedder=first)
    ranker.prepare(index=tmp_path / "index")
    second = retrieval.Ranker(TASK, kind, 2, embedder=again)
    second.prepare(index=tmp_path / "index")
    assert len(first.asked) >= len(CORPUS) > len(again.asked)
    assert ids(second(asked)) == ids(ranker(asked))
    assert ids(ranker(asked))[0] == "bread"
    assert ranker.settings["embedder"] == "words"


def test_what_can_not_be_served_is_refused_before_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="dense needs --embedder"):
        retrieval.Ranker(TASK, "dense")
    with pytest.raises(InputError, match="bm25 has no --embedder"):
        retrieval.Ranker(TASK, "bm25", embedder="x")
    monkeypatch.setattr(retrieval, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"sentence-transformers.*\.\[retrievers"):
        retrieval.Ranker(TASK, "dense", embedder="all-MiniLM-L6-v2")
