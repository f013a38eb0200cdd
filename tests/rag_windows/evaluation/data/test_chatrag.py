from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rag_windows import DataError, InputError
from rag_windows.evaluation.chatrag import DATASETS, INSTRUCTION, ChatRagTask
from rag_windows.evaluation.metrics import SORRY
from rag_windows.evaluation.task import Task
from tests.rag_windows.evaluation.data.made import TEXTS, chatrag, record, write, write_lines


def read(folder: Path, *records: Any, dataset: str = "doc2dial", **options: Any) -> ChatRagTask:
    return ChatRagTask.read(write(folder / "test.json", records), dataset, **options)


def test_records_become_examples(tmp_path: Path) -> None:
    task: Task = read(tmp_path, chatrag(), style="plain")
    one = task.examples[0]
    assert (task.name, one.key, task.pool) == ("chatrag/doc2dial", "doc2dial/1", None)
    assert [answer.text for answer in one.references] == ["In 1902.", "1902"]
    assert one.question == "And wired?"
    assert one.passages is not None
    assert [(p.title, p.text, p.score) for p in one.passages] == [
        ("Lighthouse", TEXTS["Lighthouse:2"], 81.5),
        ("Harbour", TEXTS["Harbour:4"], 79.0),
    ]
    assert len({p.id for p in one.passages}) == 2
    assert one.kinds == ()
    assert task.prefix is None
    assert task.metrics == ("f1",)
    assert json.loads(json.dumps(task.settings)) == task.settings


def test_the_benchmarks_form_is_the_default(tmp_path: Path) -> None:
    task = read(tmp_path, chatrag())
    one = task.examples[0]
    assert task.prefix == INSTRUCTION
    assert task.max_new_tokens == 64
    assert one.messages[0]["content"].startswith("Please give a full and complete answer for the")
    assert one.details["conversation"][0]["content"] == "When was the lighthouse built?"
    assert one.passages is not None
    assert one.passages[1].text == f"title: Harbour, source: {TEXTS['Harbour:4']}"


def test_lines_are_read_as_a_list_is(tmp_path: Path) -> None:
    rows = [chatrag(), chatrag(answers=["No."])]
    lines = ChatRagTask.read(write_lines(tmp_path / "test.jsonl", rows), "coqa")
    assert lines.examples == read(tmp_path, *rows, dataset="coqa").examples


def test_the_same_first_message_is_the_same_conversation(tmp_path: Path) -> None:
    first = chatrag(messages=chatrag()["messages"][:1])
    other = chatrag(messages=[{"role": "user", "content": "Who owns the ferry?"}])
    groups = [one.group for one in read(tmp_path, first, other, chatrag()).examples]
    assert groups == ["doc2dial/1", "doc2dial/2", "doc2dial/1"]


def test_answers_in_every_form(tmp_path: Path) -> None:
    def texts(**given: Any) -> list[str]:
        row = chatrag()
        del row["answers"]
        return [one.text for one in read(tmp_path, {**row, **given}).examples[0].references]

    assert texts(answers=["a", "", " b "]) == ["a", "", " b "]
    assert texts(answer="a") == ["a"]
    assert texts(answer=["a", "b"]) == ["a", "b"]
    assert texts(answer=12.5) == ["12.5"]
    assert texts(answers=None, answer="a") == ["a"]


@pytest.mark.parametrize("dataset", ["quac", "doqa_movies"])
def test_questions_without_answer_are_a_kind(tmp_path: Path, dataset: str) -> None:
    task = read(tmp_path, chatrag(answers=[SORRY]), chatrag(), dataset=dataset)
    assert [one.kinds for one in task.examples] == [("unanswerable",), ("answerable",)]
    records = [record(one.key, "Sorry, I cannot find the answer.") for one in task.examples]
    pytest.importorskip("numpy")
    found = {one.name: one.value for one in task.scores(task.examples, records)}
    assert tuple(found) == task.metrics
    assert found["unanswerable_accuracy"] == 100.0
    assert found["answerable_accuracy"] == 0.0


def test_convfinqa_has_a_result(tmp_path: Path) -> None:
    task = read(tmp_path, chatrag(exe_answer=91.0), chatrag(exe_answer="yes"), dataset="convfinqa")
    assert [one.details["exe_answer"] for one in task.examples] == [91.0, "yes"]
    records = [record(task.examples[0].key, "It is 91"), record(task.examples[1].key, "No.")]
    assert [one.value for one in task.scores(task.examples, records)] == [50.0]


def test_right_passages_are_known_by_their_text(tmp_path: Path) -> None:
    right = {"ctx": f"  {TEXTS['Harbour:4']} ", "title": "Harbour"}
    elsewhere = {"ctx": TEXTS["Lighthouse:1"]}
    task = read(
        tmp_path,
        chatrag(ground_truth_ctx=right),
        chatrag(ground_truth_ctx=[elsewhere, right]),
        chatrag(),
        style="plain",
    )
    one, two, three = task.examples
    assert one.passages is not None
    assert one.evidence == {one.passages[1].id}
    assert len(two.evidence) == 2
    assert two.evidence > one.evidence
    assert three.evidence == frozenset()
    assert [p.title for p in task.gold(one)] == ["Harbour"]
    assert len(task.gold(two)) == 2
    assert task.gold(three) == ()


def test_right_passages_written_otherwise_are_no_evidence(tmp_path: Path) -> None:
    task = read(tmp_path, chatrag(ground_truth_ctx={"ctx": "Another form of it."}))
    assert task.examples[0].evidence == frozenset()
    assert len(task.gold(task.examples[0])) == 1


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("hybridialogue", "did you mean hybridial?"),
        ("Doc2Dial", "did you mean doc2dial?"),
        ("topiqa", "did you mean topiocqa?"),
        ("doqa", "did you mean doqa_cooking or doqa_movies or doqa_travel?"),
        ("xyz", "'xyz' is no dataset of ChatRAG-Bench. It has doc2dial, quac"),
        ("", "'' is no dataset of ChatRAG-Bench. It has doc2dial, quac"),
    ],
)
def test_a_wrong_dataset_name_gets_all_names_and_the_nearest(
    tmp_path: Path, name: str, near: str
) -> None:
    with pytest.raises(DataError) as caught:
        read(tmp_path, chatrag(), dataset=name)
    assert near in str(caught.value)
    assert all(one in str(caught.value) for one in DATASETS)
    assert "\n" not in str(caught.value)


def test_an_unknown_style_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="Unknown style"):
        read(tmp_path, chatrag(), style="official")


USER = {"role": "user", "content": "q"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"answers": []}, ", answers: List should have at least 1 item"),
        ({"answers": None}, ", answers: Field required."),
        ({"answers": "x"}, ", answers: Input should be a valid array."),
        ({"answers": ["x", None]}, ", answers 2, str: Input should be a valid string."),
        ({"answers": None, "answer": []}, ", answers: List should have at least 1 item"),
        ({"messages": None}, ", messages: Field required."),
        ({"messages": []}, ", messages: List should have at least 1 item"),
        (
            {"messages": [USER, {"role": "assistant", "content": "a"}]},
            ", messages: the last message is the assistant's; it must be a question.",
        ),
        ({"messages": [{"role": "user"}]}, ", messages 1, content: Field required."),
        ({"messages": [USER, {"content": "x"}]}, ", messages 2, role: Field required."),
        ({"messages": [{"role": "bot\x1b", "content": "x"}]}, ", messages 1, role: Input should"),
        ({"messages": ["q"]}, ", messages 1: Input should be an object."),
        ({"ctxs": []}, ': it has no passages; give them as "ctxs", "documents" or "document".'),
        ({"ctxs": {}}, ", passages: Input should be a valid array."),
        ({"ctxs": [{"title": "T"}]}, ", passages 1, text: Field required."),
        ({"ctxs": [{"text": "t"}, 3]}, ", passages 2: Input should be an object."),
        ({"ctxs": [{"text": "t", "title": 3}]}, ", passages 1, title: Input should be a valid s"),
        ({"ctxs": [{"text": "t", "score": "high"}]}, ", passages 1, score: could not convert"),
        ({"ctxs": [{"text": "t", "score": "nan"}]}, ", passages 1, score: Input should be a fin"),
        ({"ctxs": [{"text": "t", "id": 1.5}]}, ", passages 1, id, str: Input should be a valid"),
    ],
)
def test_malformed_records_are_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError) as caught:
        read(tmp_path, chatrag(), chatrag(**changes))
    where = f"{tmp_path / 'test.json'}, record 2"
    assert str(caught.value).startswith(where)
    assert str(caught.value).removeprefix(where).startswith(message)
    assert "\x1b" not in str(caught.value)


@pytest.mark.parametrize(
    ("exe", "told"),
    [
        ({}, '"exe_answer" is missing'),
        ({"exe_answer": None}, '"exe_answer" is missing'),
        ({"exe_answer": [1]}, "exe_answer, str: Input should be a valid string"),
    ],
)
def test_convfinqa_without_a_result_is_told(tmp_path: Path, exe: dict[str, Any], told: str) -> None:
    with pytest.raises(DataError, match=told):
        read(tmp_path, chatrag(**exe), dataset="convfinqa")


def test_an_empty_list_and_other_content_are_told(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no record in it"):
        read(tmp_path)
    with pytest.raises(DataError, match="record 1: Input should be an object"):
        read(tmp_path, [])
