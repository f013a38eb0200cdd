"""Which passages a question is read with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from rag_windows import InputError, MissingExtraError, Passage
from rag_windows.evaluation import retrieval
from tests.rag_windows.evaluation.invented import invented

TASK = replace(
    invented(),
    pool=(
        Passage("The lighthouse of Orvell is grey.", "a"),
        Passage("The ferry to Orvell leaves at nine.", "b"),
        Passage("Nobody owns the harbour.", "c"),
    ),
)


def example(*said: str, **details: Any) -> Any:
    roles = ["user", "assistant"] * len(said)
    messages = tuple({"role": r, "content": c} for r, c in zip(roles, said, strict=False))
    return replace(TASK.examples[0], messages=messages, details=details)


class Letters:
    """Embeds by the letters of a text, and counts what it embeds."""

    name: str = "letters"
    revision: str | None = None
    dimension: int = 26

    def __init__(self) -> None:
        self.embedded: list[str] = []

    def passage_parts(self, text: str, title: str | None) -> list[str]:
        return [text]

    def query_parts(self, query: str) -> list[str]:
        return [query]

    def embed(
        self,
        texts: Sequence[str],
        *,
        query: bool,
        progress: Callable[[int, int], None] | None = None,
    ) -> NDArray[np.float32]:
        if not query:
            self.embedded += texts
        rows = [[text.lower().count(chr(97 + i)) for i in range(26)] for text in texts]
        found = np.asarray(rows, dtype=np.float32)
        return found / np.linalg.norm(found, axis=1, keepdims=True)


def ids(passages: Sequence[Passage]) -> list[str | None]:
    return [one.id for one in passages]


def test_the_conversation_is_the_query_without_a_styles_wording() -> None:
    ranker = retrieval.Ranker(TASK, "bm25", 2)
    assert ids(ranker(example("When does it leave?"))) == []
    assert ids(ranker(example("Is there a ferry?", "Yes.", "When does it leave?"))) == ["b"]
    bare = [{"role": "user", "content": "Who owns the harbour?"}]
    asked = example("Answer over the lighthouse: who owns the harbour?", conversation=bare)
    assert ids(retrieval.Ranker(TASK, "bm25", 1)(asked)) == ["c"]
    assert ranker.settings == {
        "retriever": "bm25",
        "depth": 2,
        "query": {"turns": 3, "weight": 3},
    }


def test_given_passages_keep_their_order() -> None:
    asked = TASK.examples[1]
    assert ids(retrieval.Ranker(TASK, "given", None)(asked)) == ids(asked.passages or ())
    assert ids(retrieval.Ranker(TASK, "given", 2)(asked)) == ids(asked.passages or ())[:2]


@pytest.mark.parametrize("kind", ["dense", "hybrid"])
def test_vectors_are_kept_and_embedded_once(tmp_path: Path, kind: Any) -> None:
    first, again = Letters(), Letters()
    asked, texts = example("Nobody owns the harbour"), {one.text for one in TASK.pool or ()}
    ranker = retrieval.Ranker(TASK, kind, 2, embedder=first)
    ranker.prepare(index=tmp_path / "index")
    assert texts <= set(first.embedded)
    second = retrieval.Ranker(TASK, kind, 2, embedder=again)
    second.prepare(index=tmp_path / "index")
    assert not texts & set(again.embedded)
    assert ids(second(asked)) == ids(ranker(asked))
    assert ids(ranker(asked))[0] == "c"
    assert ranker.settings["embedder"] == "letters"


def test_what_can_not_be_served_is_refused_before_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="dense needs --embedder"):
        retrieval.Ranker(TASK, "dense")
    with pytest.raises(InputError, match="bm25 has no --embedder"):
        retrieval.Ranker(TASK, "bm25", embedder="x")
    monkeypatch.setattr(retrieval, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"sentence-transformers.*\.\[retrievers"):
        retrieval.Ranker(TASK, "dense", embedder="all-MiniLM-L6-v2")
