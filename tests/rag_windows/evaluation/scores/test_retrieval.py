from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rag_windows import InputError
from rag_windows.evaluation.metrics import DEPTHS, retrieval_scores
from tests.rag_windows.evaluation.scores.made import example, values

IDS = st.sampled_from("abcdef")


def test_by_hand() -> None:
    asked = [
        example("x", "y", evidence=[["a"], ["b", "c", "a"]]),
        example("x", evidence=[["d"]]),
        example("x", evidence=[["e"]]),
        example("x"),
    ]
    rankings: list[list[str | None]] = [["f", "b", None, "a"], ["d"], ["a", "b"], ["a"]]
    scores = retrieval_scores(asked, rankings, (1, 2, 4))
    found = {score.name: score.values for score in scores}
    assert list(found) == ["recall@1", "recall@2", "recall@4", "hit@1", "hit@2", "hit@4", "mrr"]
    assert found["recall@1"] == (0, 100, 0, None)
    assert found["recall@2"] == pytest.approx((100 / 3, 100, 0, None))
    assert found["recall@4"] == pytest.approx((200 / 3, 100, 0, None))
    assert found["hit@1"] == (0, 100, 0, None)
    assert found["hit@2"] == (100, 100, 0, None)
    assert found["mrr"] == (50, 100, 0, None)
    assert values(scores)["mrr"] == 50


def test_a_passage_found_twice_counts_once() -> None:
    asked = [example("x", evidence=[["a", "b"]])]
    found = values(retrieval_scores(asked, [["a", "a", "a"]], (3,)))
    assert found == {"recall@3": 50, "hit@3": 100, "mrr": 100}


def test_without_evidence_there_is_no_number() -> None:
    scores = retrieval_scores([example("x")], [["a"]])
    assert len(scores) == 2 * len(DEPTHS) + 1
    assert all(math.isnan(score.value) for score in scores)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(InputError, match="0 rankings for 1 examples"):
        retrieval_scores([example("x")], [])
    with pytest.raises(InputError, match=r"1 or more, not \[5, 0\]"):
        retrieval_scores([example("x")], [["a"]], (5, 0))


@given(st.lists(IDS, min_size=1, max_size=4), st.lists(IDS | st.none(), max_size=8))
def test_deeper_finds_no_less_and_more_than_all_is_never_found(
    right: list[str], ranking: list[str | None]
) -> None:
    asked = [example("x", evidence=[right])]
    found = values(retrieval_scores(asked, [ranking], (1, 2, 4, 8)))
    recalls = [found[f"recall@{depth}"] for depth in (1, 2, 4, 8)]
    assert recalls == sorted(recalls)
    assert recalls[-1] == pytest.approx(100 * len(set(right) & set(ranking)) / len(set(right)))
    assert (found["mrr"] > 0) == (found["hit@8"] == 100) == (recalls[-1] > 0)
    assert found["mrr"] <= 100
