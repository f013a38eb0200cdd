from __future__ import annotations

import pytest

from rag_windows import InputError, Passage


def test_a_passage_from_each_kind_of_value() -> None:
    assert Passage.of("a") == Passage("a")
    passage = Passage("a", id="1")
    assert Passage.of(passage) is passage
    assert Passage.of({"text": "a", "id": 3, "score": 1, "title": "T"}) == Passage(
        "a", id="3", title="T", score=1.0
    )
    assert Passage.of({"page_content": "a", "metadata": {"title": "T", "id": "x"}}) == Passage(
        "a", id="x", title="T", metadata={"title": "T", "id": "x"}
    )


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (3, "must be a string, a Passage or a mapping"),
        ({"id": "1"}, "must have a 'text' key"),
        ({"text": "a", "titel": "b"}, r"unknown keys \['titel'\]"),
        ({"text": 3}, "Passage.text must be a string, not int"),
        ({"text": "a", "title": 3}, "Passage.title must be a string"),
    ],
)
def test_bad_values_say_what_to_do(value: object, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Passage.of(value)  # type: ignore[arg-type]  # the error is the test
