from __future__ import annotations

import pytest

from rag_windows import InputError, Passage
from rag_windows_retrievers import HybridRetriever, ScoredPassage


class Fixed:
    """Always finds the same ids."""

    def __init__(self, ids: str) -> None:
        self.ids = ids
        self.asked: list[int] = []

    def retrieve(self, query: str, k: int = 8) -> list[ScoredPassage]:
        self.asked.append(k)
        return [Passage(one, id=one, score=100.0 - i) for i, one in enumerate(self.ids)][:k]


def test_scores_follow_the_formula() -> None:
    hits = HybridRetriever([Fixed("abc"), Fixed("cd")], weights=[1, 2], constant=10).retrieve("q")
    scores = {one.id: one.score for one in hits}
    assert [one.id for one in hits] == ["c", "d", "a", "b"]
    assert scores["c"] == pytest.approx(1 / 13 + 2 / 11)
    assert scores["d"] == pytest.approx(2 / 12)
    assert scores["a"] == pytest.approx(1 / 11)


def test_ties_keep_the_order_of_the_retrievers() -> None:
    hits = HybridRetriever([Fixed("abc"), Fixed("xyz")]).retrieve("q")
    assert "".join(str(one.id) for one in hits) == "axbycz"


def test_a_passage_counts_once_a_retriever() -> None:
    assert HybridRetriever([Fixed("aab"), Fixed("ba")]).retrieve("q", 1)[0].id == "a"
    (hit,) = HybridRetriever([Fixed("aa")]).retrieve("q")
    assert hit.score == pytest.approx(1 / 61)


def test_equal_ids_of_different_texts_stay_apart() -> None:
    class Other(Fixed):
        def retrieve(self, query: str, k: int = 8) -> list[ScoredPassage]:
            return [Passage("another text", id="a", score=1.0)]

    assert len(HybridRetriever([Fixed("a"), Other("")]).retrieve("q")) == 2


def test_each_is_asked_for_more_than_k() -> None:
    one = Fixed("abc")
    HybridRetriever([one], depth=20).retrieve("q", 2)
    HybridRetriever([one], depth=20).retrieve("q", 30)
    assert one.asked == [20, 30]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"retrievers": []}, "Name the retrievers"),
        ({"weights": [1.0]}, "2 retrievers need as many weights, not 1"),
        ({"weights": [1.0, 0.0]}, "Weights must be above 0"),
        ({"weights": [1.0, float("nan")]}, "Weights must be above 0"),
        ({"constant": -1.0}, "constant must be at least 0"),
        ({"depth": 0}, "depth must be at least 1"),
    ],
)
def test_what_is_refused(arguments: dict[str, object], message: str) -> None:
    given: dict[str, object] = {"retrievers": [Fixed("a"), Fixed("b")], **arguments}
    with pytest.raises(InputError, match=message):
        HybridRetriever(**given)  # type: ignore[arg-type]  # wrong values are what is tested
