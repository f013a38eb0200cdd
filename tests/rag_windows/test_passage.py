from __future__ import annotations

from typing import Any

import pytest
from langchain_core.documents import Document
from llama_index.core.schema import TextNode

from llama_index.llms.rag_windows import Parts
from rag_windows import InputError, Passage, with_neighbours
from rag_windows.integration import keep_neighbours
from rag_windows_retrievers import BM25Retriever, split_documents
from rag_windows_retrievers import Document as CorpusDocument


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
    "single",
    [
        *("a text", Passage("a text"), {"text": "a text"}),
        *(Document(page_content="a text"), TextNode(text="a text")),
    ],
)
def test_a_single_passage_is_not_read_as_its_characters(single: Any) -> None:
    for takes_several in (with_neighbours, keep_neighbours, Parts.of, BM25Retriever):
        with pytest.raises(InputError, match="passages must be a list of passages, not a single"):
            takes_several(single)
    no_document: Any = "a text"
    with pytest.raises(InputError, match="A document must be a Document, not str"):
        split_documents(no_document)
    assert len(split_documents(CorpusDocument("a text", "a"))) == 1


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
