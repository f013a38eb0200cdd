from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rag_windows import DataError
from rag_windows.evaluation.chatrag import ChatRagTask, name_of
from rag_windows.passage import Passage

TABLE = [["Year", "Boats"], [1902, 12], [1903, None]]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def task_of(record: dict[str, Any]) -> ChatRagTask:
    asked = {"messages": [{"role": "user", "content": "Who?"}], "answers": ["x"]}
    Path("test.json").write_text(json.dumps([{**asked, **record}]))
    return ChatRagTask.read("test.json", "coqa", style="plain")


def passages_of(record: dict[str, Any]) -> tuple[Passage, ...]:
    return task_of(record).examples[0].passages or ()


def texts(record: dict[str, Any]) -> list[str]:
    return [one.text for one in passages_of(record)]


@pytest.mark.parametrize("name", ["ctxs", "documents", "document"])
def test_lists_in_every_field_keep_their_order(name: str) -> None:
    assert texts({name: [{"text": "b", "score": 1}, "a", {"text": "c", "score": 9}]}) == [
        "b",
        "a",
        "c",
    ]


def test_ranked_contexts_come_before_whole_documents() -> None:
    record = {"document": "whole", "documents": ["first", "second"], "ctxs": ["ranked"]}
    assert texts(record) == ["ranked"]
    assert texts({**record, "ctxs": None}) == ["first", "second"]
    assert texts({**record, "ctxs": [], "documents": None}) == ["whole"]
    assert texts({"document": {"text": "whole", "title": "T"}}) == ["whole"]


@pytest.mark.parametrize(
    "record", [{"document": TABLE}, {"ctxs": [TABLE]}, {"ctxs": [{"text": TABLE}]}]
)
def test_tables_are_kept_as_text(record: dict[str, Any]) -> None:
    assert texts(record) == ["Year | Boats\n1902 | 12\n1903 | "]


def test_a_table_that_is_text_already_stays_as_it_is() -> None:
    text = "| Year | Boats |\n|---|---|\n| 1902 | 12 |"
    assert texts({"ctxs": [{"text": text, "title": "Boats"}]}) == [text]


def test_ids_are_those_of_the_file_or_of_the_text() -> None:
    found = passages_of({"ctxs": [{"text": "a b", "id": 7}, {"text": "a  b"}, "a b", "c"]})
    assert found[0].id == "7"
    assert found[1].id == found[2].id == name_of("a b")
    assert found[3].id != found[1].id


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (
            {"ctxs": [[["a", {"b": 1}]]]},
            "passages 1, text: a cell of a table must be a text or a number.",
        ),
        ({"ctxs": [{"text": ["a", "b"]}]}, "passages 1, text: Input should be a valid string."),
        ({"document": 3}, "passages 1: Input should be an object."),
        ({"documents": "text"}, "passages: Input should be a valid array."),
        ({}, "it has no passages"),
    ],
)
def test_other_forms_are_told(record: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=r"^test\.json, record 1") as caught:
        passages_of(record)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("value", "found"),
    [
        ({"ctx": "a", "title": "T", "index": 3}, [("a", "T")]),
        ([{"ctx": "a"}, {"text": "b", "title": 3}], [("a", None), ("b", None)]),
        ("a", [("a", None)]),
        (None, []),
        ({"ctx": " "}, []),
        ([3, {"ctx": None}], []),
    ],
)
def test_right_passages_in_every_form(value: Any, found: list[tuple[str, str | None]]) -> None:
    task = task_of({"ctxs": ["z"], "ground_truth_ctx": value})
    assert [(one.text, one.title) for one in task.gold(task.examples[0])] == found


def test_a_right_passage_is_the_best_ranked_one_with_its_text() -> None:
    passages = [{"text": text, "id": name} for text, name in (("a  b", "1"), ("a b", "2"))]
    task = task_of({"ctxs": passages, "ground_truth_ctx": ["a b", "d"]})
    assert task.examples[0].references[0].evidence == ("1", name_of("d"))
