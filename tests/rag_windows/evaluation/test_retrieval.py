from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from numpy.typing import NDArray

from rag_windows import DataError, InputError, MissingExtraError, Passage
from rag_windows.evaluation import retrieval
from rag_windows.evaluation.record import Record
from rag_windows.evaluation.retrieval import Kind, Ranker
from rag_windows.evaluation.task import Example, Reference, Score

POOL = (
    Passage("The lighthouse of Orvell is grey.", "a"),
    Passage("The ferry to Orvell leaves at nine.", "b"),
    Passage("Nobody owns the harbour.", "c"),
)


def example(*said: str, **changes: Any) -> Example:
    roles = ["user", "assistant"] * len(said)
    messages = tuple({"role": r, "content": c} for r, c in zip(roles, said, strict=False))
    return Example("k", messages, (Reference("x", None, ("c", "a")),), "g", **changes)


@dataclass(frozen=True)
class Searched:
    """A task with a pool and without gold."""

    examples: Sequence[Example] = ()
    pool: Sequence[Passage] | None = POOL
    name: str = "invented"
    prefix: str | None = None
    max_new_tokens: int = 4
    metrics: tuple[str, ...] = ()

    @property
    def settings(self) -> dict[str, Any]:
        return {}

    def scores(self, examples: Sequence[Example], records: Sequence[Record]) -> list[Score]:
        return []


class Golden(Searched):
    """The same with gold, in another order than the pool."""

    def gold(self, example: Example) -> tuple[Passage, ...]:
        return (POOL[2], POOL[0])


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
        if progress is not None:
            progress(len(texts), len(texts))
        rows = [[text.lower().count(chr(97 + i)) for i in range(26)] for text in texts]
        found = np.asarray(rows, dtype=np.float32)
        return found / np.linalg.norm(found, axis=1, keepdims=True)


def ids(passages: Sequence[Passage]) -> list[str | None]:
    return [one.id for one in passages]


def test_the_conversation_is_the_query() -> None:
    ranker = Ranker(Searched(), "bm25", 2)
    assert ids(ranker(example("When does it leave?"))) == []
    later = example("Is there a ferry?", "Yes.", "When does it leave?")
    assert ids(ranker(later)) == ["b"]
    assert ranker(later)[0].score is not None


def test_a_style_that_words_the_question_is_not_searched_with() -> None:
    asked = example(
        "Answer over the lighthouse, please: who owns the harbour?",
        details={"conversation": [{"role": "user", "content": "Who owns the harbour?"}]},
    )
    assert ids(Ranker(Searched(), "bm25", 1)(asked)) == ["c"]


def test_gold_is_the_evidence_and_nothing_else() -> None:
    assert ids(Ranker(Golden(), "gold", None)(example("Who?"))) == ["c", "a"]
    assert ids(Ranker(Golden(), "gold", 1)(example("Who?"))) == ["c"]


def test_given_passages_keep_their_order() -> None:
    task = Searched((example("Who?", passages=POOL[::-1]),), pool=None)
    assert ids(Ranker(task, "given", None)(task.examples[0])) == ["c", "b", "a"]
    assert ids(Ranker(task, "given", 2)(task.examples[0])) == ["c", "b"]


@pytest.mark.parametrize("kind", ["dense", "hybrid"])
def test_vectors_are_kept_and_embedded_once(tmp_path: Path, kind: Kind) -> None:
    first, again, without = Letters(), Letters(), Letters()
    asked = example("Nobody owns the harbour")
    told: list[tuple[int, int]] = []
    ranker = Ranker(Searched(), kind, 2, embedder=first)
    ranker.prepare(lambda done, whole: told.append((done, whole)), tmp_path / "index")
    assert ids(ranker(asked))[0] == "c"
    assert told[-1] == (3, 3)
    texts = {one.text for one in POOL}
    assert texts <= set(first.embedded)
    second = Ranker(Searched(), kind, 2, embedder=again)
    second.prepare(index=tmp_path / "index")
    assert not texts & set(again.embedded)
    assert ids(second(asked)) == ids(ranker(asked))
    assert ids(Ranker(Searched(), kind, 2, embedder=without)(asked)) == ids(ranker(asked))
    # A pool with one passage more embeds that one.
    more = Searched(pool=(*POOL, Passage("Owls sleep.", "d")))
    third = Ranker(more, kind, 2, embedder=(grown := Letters()))
    third.prepare(index=tmp_path / "index")
    assert set(grown.embedded) & {*texts, "Owls sleep."} == {"Owls sleep."}


def test_damaged_vectors_are_told(tmp_path: Path) -> None:
    Ranker(Searched(), "dense", 2, embedder=Letters()).prepare(index=tmp_path / "index")
    (tmp_path / "index" / "dense.safetensors").write_text("{")
    broken = Ranker(Searched(), "dense", 2, embedder=Letters())
    with pytest.raises(DataError, match="Delete that folder"):
        broken.prepare(index=tmp_path / "index")


def test_settings_name_all_that_rankings_depend_on() -> None:
    assert Ranker(Searched(), "bm25", 5).settings == {
        "retriever": "bm25",
        "depth": 5,
        "query": {"turns": 3, "weight": 3},
    }
    dense = Ranker(Searched(), "dense", 5, embedder=Letters())
    assert dense.settings["embedder"] == "letters"
    assert Ranker(Searched(), "hybrid", 5, embedder="folder/x").settings["embedder"] == "folder/x"
    assert Ranker(Golden(), "gold", None).settings == {"retriever": "gold", "depth": None}


@pytest.mark.parametrize(
    ("task", "arguments", "message"),
    [
        (Searched(), {"kind": "dense"}, "needs --embedder: the name or folder"),
        (Searched(), {"kind": "hybrid"}, "needs --embedder"),
        (Searched(), {"kind": "bm25", "embedder": "x"}, "--embedder is of"),
        (Searched(), {"kind": "gold"}, "does not tell which passages are right"),
        (Searched(pool=None), {"kind": "bm25"}, "no pool of passages"),
        (Searched((example("Who?"),)), {"kind": "given"}, "brings no passages for 'k'"),
        (Searched(), {"kind": "bm25", "depth": None}, "--top-k"),
        (Searched(), {"kind": "bm25", "depth": 0}, "--top-k must be at least 1"),
        (Searched(), {"kind": "colbert"}, "is none of " + ", ".join(get_args(Kind))),
    ],
)
def test_what_can_not_be_served_is_refused_before_the_work(
    task: Searched, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        Ranker(task, **arguments)


def test_a_missing_package_is_told_before_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retrieval, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"sentence-transformers.*\.\[retrievers"):
        Ranker(Searched(), "dense", 2, embedder="all-MiniLM-L6-v2")
    Ranker(Searched(), "dense", 2, embedder=Letters())
