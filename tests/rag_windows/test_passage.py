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


@pytest.mark.parametrize(
    ("index", "metadata", "place"),
    [
        (None, {}, None),
        (0, {}, None),
        (6, {}, "part 7"),
        (0, {"page": 3}, "page 3"),
        (6, {"page": 3, "last_page": 3}, "page 3, part 7"),
        (6, {"page": 3, "last_page": 5}, "pages 3-5, part 7"),
        (1, {"section": "Setup > Install"}, "Setup > Install, part 2"),
        (None, {"page": 2, "page_label": "iv"}, "page iv"),  # as LangChain's loaders count: from 0
        (2, {"page": None, "section": ["a"], "last_page": 4}, "part 3"),
        (2, {"page": True, "section": " "}, "part 3"),
    ],
)
def test_passages_of_one_document_differ_by_their_place(
    index: int | None, metadata: dict[str, object], place: str | None
) -> None:
    assert Passage("a", document="d", index=index, metadata=metadata).place == place
