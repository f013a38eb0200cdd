from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rag_windows.errors import InputError
from rag_windows_retrievers import Document, TokenBudget, split_document


def bytes_and_joints(text: str) -> int:
    """A count that is no sum over parts: each byte counts, and a gap costs two more."""
    return len(text.encode()) + 2 * text.count(" ")


PIECES = [*"ab.!?\n \t#。東", "a b. C ", "\n\n", "# a\n\n", "x" * 30]


@settings(max_examples=50)
@given(st.lists(st.sampled_from(PIECES), max_size=40).map("".join), st.integers(4, 40))
def test_the_budget_is_kept_and_no_text_is_lost(text: str, limit: int) -> None:
    budget = TokenBudget(limit, bytes_and_joints)
    passages = split_document(Document(text, "doc"), tokens=budget)
    assert "".join("".join(one.text.split()) for one in passages) == "".join(text.split())
    for one in passages:
        assert one.text == text[one.metadata["start"] : one.metadata["end"]].strip() == one.text
        assert bytes_and_joints(one.text) <= limit


def test_sentences_share_a_passage_while_they_fit() -> None:
    budget = TokenBudget(9, lambda text: len(text.split()))
    text = "One two three four. Five six seven. Eight nine. Ten eleven twelve thirteen."
    passages = split_document(Document(text, "doc", "T"), tokens=budget)
    assert [one.text for one in passages] == [
        "One two three four. Five six seven. Eight nine.",
        "Ten eleven twelve thirteen.",
    ]
    assert [(one.id, one.title) for one in passages] == [("doc#1", "T"), ("doc#2", "T")]


def test_a_long_text_without_borders_takes_linear_time() -> None:
    counted = 0

    def count(text: str) -> int:
        nonlocal counted
        counted += len(text)
        return len(text) // 4

    text = "x" * 200_000
    begun = time.monotonic()
    passages = split_document(Document(text, "doc"), tokens=TokenBudget(100, count))
    assert sum(len(one.text) for one in passages) == len(text)
    assert counted < 20 * len(text)
    assert time.monotonic() - begun < 10


def test_what_is_refused() -> None:
    with pytest.raises(InputError, match="at least 1 token, not 0"):
        TokenBudget(0, len)
    with pytest.raises(InputError, match="can't hold a character of 3"):
        split_document(Document("東", "doc"), tokens=TokenBudget(2, bytes_and_joints))
