from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rag_windows.errors import DataError, InputError
from rag_windows.evaluation.data.chatrag import DATASETS, ChatRagTask
from rag_windows.evaluation.data.chatrag_form import INSTRUCTION
from rag_windows.evaluation.scores.refusal import SORRY
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
        ({"answers": []}, '"answers" is empty; each record needs at least one answer.'),
        ({"answers": None}, '"answers" is missing; it must be a list with at least one answer.'),
        ({"answers": "x"}, '"answers" must be a list, not a string.'),
        ({"answers": ["x", None]}, 'entry 2 of "answers" must be a string, not null.'),
        ({"answers": None, "answer": []}, '"answer" is empty'),
        ({"messages": None}, '"messages" must be a list, not null.'),
        ({"messages": []}, '"messages" is empty; the last one must hold the question.'),
        (
            {"messages": [USER, {"role": "assistant", "content": "a"}]},
            'the last of the "messages" is the assistant\'s; it must be a question.',
        ),
        ({"messages": [{"role": "user"}]}, 'message 1: "content" is missing'),
        ({"messages": [USER, {"content": "x"}]}, 'message 2: "role" is missing'),
        ({"messages": [{"role": "bot\x1b", "content": "x"}]}, "message 1: \"role\" is 'bot\\x1b'"),
        ({"messages": ["q"]}, "message 1: this must be an object, not a string."),
        ({"ctxs": []}, 'it has no passages; give them as "ctxs", "documents" or "document".'),
        ({"ctxs": {}}, '"ctxs" must be a list, not an object.'),
        ({"ctxs": [{"title": "T"}]}, '"ctxs" 1: "text" is missing; it must be a string.'),
        ({"ctxs": [{"text": "t"}, 3]}, '"ctxs" 2: a passage must be an object or a string'),
        ({"ctxs": [{"text": "t", "title": 3}]}, '"ctxs" 1: "title" must be a string'),
        (
            {"ctxs": [{"text": "t", "score": "high"}]},
            '"ctxs" 1: "score" must be a number, not \'high\'',
        ),
        (
            {"ctxs": [{"text": "t", "score": "nan"}]},
            '"ctxs" 1: "score" must be a number, not \'nan\'',
        ),
        ({"ctxs": [{"text": "t", "id": 1.5}]}, '"ctxs" 1: "id" must be a string or a whole number'),
    ],
)
def test_malformed_records_are_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError) as caught:
        read(tmp_path, chatrag(), chatrag(**changes))
    where = f"{tmp_path / 'test.json'}, record 2"
    assert str(caught.value).startswith(where)
    assert message in str(caught.value).removeprefix(where)


@pytest.mark.parametrize(
    ("exe", "told"),
    [({}, "missing"), ({"exe_answer": None}, "null"), ({"exe_answer": [1]}, "a list")],
)
def test_convfinqa_without_a_result_is_told(tmp_path: Path, exe: dict[str, Any], told: str) -> None:
    with pytest.raises(
        DataError, match=f'"exe_answer" must be a number or a string, and is {told}'
    ):
        read(tmp_path, chatrag(**exe), dataset="convfinqa")


def test_an_empty_list_and_other_content_are_told(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no record in it"):
        read(tmp_path)
    with pytest.raises(DataError, match="record 1: this must be an object, not a list"):
        read(tmp_path, [])
