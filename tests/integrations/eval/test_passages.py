"""Questions that bring their passages: each format, what is read of it, and its metrics."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from rag_windows import DataError
from rag_windows_eval.passages import PassagesTask
from rag_windows_eval.task import AnswerRecord, ReadPassage

TEXTS = ["Sulava is in Ret.", "Ada was born in Sulava.", "Bo was born in Ret."]

PLAIN = {
    "question": "Where was Ada born?",
    "answers": ["Sulava"],
    "passages": [
        {"title": "Sulava", "text": TEXTS[0]},
        {"title": "Ada", "text": TEXTS[1], "right": True},
        {"text": TEXTS[2]},
    ],
}
FORMATS: dict[str, Any] = {
    "plain": PLAIN,
    "lost in the middle": {
        "question": "Where was Ada born?",
        "answers": ["Sulava"],
        "ctxs": [
            {"title": "Sulava", "text": TEXTS[0], "isgold": False, "hasanswer": True},
            {"title": "Ada", "text": TEXTS[1], "isgold": True, "hasanswer": True},
            {"title": "", "text": TEXTS[2], "isgold": False, "score": "1.5"},
        ],
    },
    "dpr": {
        "question": "Where was Ada born?",
        "answers": ["Sulava"],
        "ctxs": [
            {"title": "Sulava", "text": TEXTS[0], "has_answer": False},
            {"title": "Ada", "text": TEXTS[1], "has_answer": True, "id": 7},
            {"text": TEXTS[2], "has_answer": False},
        ],
    },
    "hotpot": {
        "_id": "5a",
        "question": "Where was Ada born?",
        "answer": "Sulava",
        "type": "bridge",
        "supporting_facts": [["Ada", 0]],
        "context": [["Sulava", ["Sulava is", " in Ret."]], ["Ada", [TEXTS[1]]], ["Bo", [TEXTS[2]]]],
    },
    "2wiki": {
        "question": "Where was Ada born?",
        "answer": "Sulava",
        "supporting_facts": [["Ada", 0]],
        "context": [["Sulava", ["Sulava is", "in Ret."]], ["Ada", [TEXTS[1]]], ["Bo", [TEXTS[2]]]],
    },
    "the hub's columns": {
        "id": "5a",
        "question": "Where was Ada born?",
        "answer": "Sulava",
        "supporting_facts": {"title": ["Ada"], "sent_id": [0]},
        "context": {
            "title": ["Sulava", "Ada", "Bo"],
            "sentences": [["Sulava is", " in Ret."], [TEXTS[1]], [TEXTS[2]]],
        },
    },
    "musique": {
        "id": "2hop",
        "question": "Where was Ada born?",
        "answer": "Sulava",
        "answer_aliases": ["Sulawa"],
        "paragraphs": [
            {"idx": 0, "title": "Sulava", "paragraph_text": TEXTS[0], "is_supporting": False},
            {"idx": 1, "title": "Ada", "paragraph_text": TEXTS[1], "is_supporting": True},
            {"idx": 2, "title": "Bo", "paragraph_text": TEXTS[2], "is_supporting": False},
        ],
    },
}


def written(folder: Path, *rows: Any, name: str = "q.jsonl") -> str:
    path = folder / name
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return str(path)


def record(task: PassagesTask, answer: str, cited: int | None = None) -> AnswerRecord:
    (one,) = task.examples
    read = tuple(
        ReadPassage("0", p.id, mass=None if cited is None else float(p.text == TEXTS[cited]))
        for p in one.passages
    )
    return AnswerRecord(one.key, "pcw", answer, passages=read)


def scored(task: PassagesTask, *given: AnswerRecord) -> dict[str, float]:
    found = task.scores([*task.examples] * len(given), given)
    return {one.name: one.value for one in found}


@pytest.mark.parametrize("name", FORMATS)
def test_each_format_says_the_same(name: str, tmp_path: Path) -> None:
    task = PassagesTask.read(written(tmp_path, FORMATS[name]))
    (one,) = task.examples
    assert one.question == "Where was Ada born?"
    assert one.references[0].text == "Sulava"
    assert sorted(passage.text for passage in one.passages) == sorted(TEXTS)
    assert {p.text: p.title for p in one.passages}[TEXTS[1]] == "Ada"
    right = [passage.text for passage in one.passages if passage.id in one.details["right"]]
    assert right == [TEXTS[1]]


def test_a_conversation(tmp_path: Path) -> None:
    turns = ["Who is Ada?", "A painter.", "Where was she born?"]
    (one,) = PassagesTask.read(written(tmp_path, {**PLAIN, "question": turns})).examples
    assert [message["content"] for message in one.messages] == turns
    assert [message["role"] for message in one.messages] == ["user", "assistant", "user"]
    with pytest.raises(DataError, match="line 1, question: it must be a text, or a list"):
        PassagesTask.read(written(tmp_path, {**PLAIN, "question": turns[:2]}))


def test_squad_distracts_with_the_other_paragraphs_of_the_article(tmp_path: Path) -> None:
    asked = {"id": "56be", "question": "Where was Ada born?", "answers": [{"text": "Sulava"}]}
    paragraphs = [
        {"context": text, "qas": [asked] if at == 1 else []} for at, text in enumerate(TEXTS)
    ]
    other = {
        "title": "Other",
        "paragraphs": [{"context": "No.", "qas": [{**asked, "id": "7", "answers": []}]}],
    }
    data = {"version": "2", "data": [{"title": "Born_here", "paragraphs": paragraphs}, other]}
    path = tmp_path / "squad.json.gz"
    path.write_bytes(gzip.compress(json.dumps(data, indent=1).encode()))
    (one,) = PassagesTask.read(str(path)).examples
    assert sorted(passage.text for passage in one.passages) == sorted(TEXTS)
    assert {passage.title for passage in one.passages} == {"Born here"}
    right = [passage.text for passage in one.passages if passage.id in one.details["right"]]
    assert right == [TEXTS[1]]


def test_right_passages_stay_and_places_are_shuffled_by_the_seed(tmp_path: Path) -> None:
    many = [{"text": f"Nothing {number}."} for number in range(30)]
    rows = [
        {**PLAIN, "question": f"{n}?", "passages": [{"text": "Right.", "right": True}, *many]}
        for n in range(20)
    ]
    path = written(tmp_path, *rows)
    task = PassagesTask.read(path, sizes=[3, 10])
    places = {3: [], 10: []}  # type: dict[int, list[int]]
    for one in task.examples:
        texts = [passage.text for passage in one.passages]
        assert one.kinds == (f"{len(texts)} passages",)
        places[len(texts)].append(texts.index("Right."))
        assert set(texts) == {"Right.", *(f"Nothing {n}." for n in range(len(texts) - 1))}
    assert set(places[3]) == {0, 1, 2}
    assert len(set(places[10])) > 5
    again, other = (PassagesTask.read(path, sizes=[3, 10], seed=seed) for seed in (0, 1))
    assert again.examples == task.examples
    assert other.examples != task.examples
    assert len({one.key for one in task.examples}) == 40
    assert {one.group for one in task.examples} == {str(n) for n in range(1, 21)}
    assert len(PassagesTask.read(path, sizes=[3, 10], questions=4).examples) == 8
    without = PassagesTask.read(path, sizes=[3], without_right=True)
    for one in without.examples:
        assert sorted(passage.text for passage in one.passages) == ["Nothing 0.", "Nothing 1."]


def test_metrics(tmp_path: Path) -> None:
    task = PassagesTask.read(written(tmp_path, PLAIN))
    said = "She was born in Sulava."
    assert scored(task, record(task, said, 1)) == pytest.approx(
        {
            "contains": 100,
            "exact": 0,
            "f1": 100 / 3,
            "not_mentioned": 0,
            "cites_right": 100,
            "cites_right_if_right": 100,
        }
    )
    wrong = scored(task, record(task, said, 1), record(task, "The Sulava!", 0))
    assert (wrong["exact"], wrong["cites_right"], wrong["contains"]) == (50, 50, 100)
    missing = scored(task, record(task, "That is not mentioned.", 1), record(task, "Ret"))
    assert (missing["not_mentioned"], missing["contains"], missing["cites_right"]) == (50, 0, 100)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"q": "Who?", "a": "Ada"},
            r"line 1: The question brings no passages in its fields \['q', 'a'\]\. Give it "
            r'"question", "answer" \(or "answers"\) and one of the fields passages, ctxs',
        ),
        (
            {**PLAIN, "answers": [" "]},
            'line 1: The question has no right answer in "answer" or "answers"',
        ),
        ({**PLAIN, "passages": []}, "line 1: The question has no passages"),
        ({**PLAIN, "passages": [{"title": "Ada"}]}, "line 1, passages 1, text: Field required"),
        ({**PLAIN, "question": 3}, "line 1, question: it must be a text"),
        ({**PLAIN, "question": [3]}, "line 1, question 1: Input should be a valid string"),
        ({**PLAIN, "question": " "}, "line 1, question: it must not be blank"),
        (
            {
                "question": "Who?",
                "answer": "Ada",
                "context": {"title": ["T"], "sentences": [["a"], ["b"]]},
                "supporting_facts": [["T", 0]],
            },
            "line 1, context: it must have as many titles as lists of sentences, not 1 and 2",
        ),
    ],
)
def test_what_is_wrong_is_named_with_its_place(row: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        PassagesTask.read(written(tmp_path, row))


def test_a_file_without_questions(tmp_path: Path) -> None:
    for text, why in (
        ("", "is empty"),
        ("[]", "no questions"),
        ('{"data": []}', "no questions"),
        ("[" * 100_000, "nested too deeply"),
        ('{"a":' * 100_000, "nested too deeply"),
    ):
        path = tmp_path / "q.json"
        path.write_text(text, encoding="utf-8")
        with pytest.raises(DataError, match=why):
            PassagesTask.read(str(path))


@pytest.mark.parametrize("ids", [("2", None, "2"), ("3", "x", "3"), (None, "1", "1"), "aaaa"])
def test_each_question_has_a_key_of_its_own(ids: Any, tmp_path: Path) -> None:
    rows = [{**PLAIN, **({} if one is None else {"id": one})} for one in ids]
    task = PassagesTask.read(written(tmp_path, *rows))
    assert len({one.key for one in task.examples}) == len({one.group for one in task.examples})
    assert len({one.key for one in task.examples}) == len(rows)


def test_each_question_of_squad_has_a_key_of_its_own(tmp_path: Path) -> None:
    asked = {"id": "q", "question": "Who?", "answers": [{"text": "Ada"}]}
    data = {"data": [{"paragraphs": [{"context": "Ada wrote.", "qas": [asked] * 3}]}]}
    path = tmp_path / "squad.json"
    path.write_text(json.dumps(data), encoding="utf-8")
    assert len({one.key for one in PassagesTask.read(str(path)).examples}) == 3


def test_one_question_over_several_lines(tmp_path: Path) -> None:
    path = tmp_path / "q.json"
    path.write_text(json.dumps(PLAIN, indent=1), encoding="utf-8")
    (one,) = PassagesTask.read(str(path), questions=10**30).examples
    assert one.references[0].text


@pytest.mark.parametrize(
    ("right", "said", "held", "exact"),
    [
        ("A", "", False, False),
        ("A", "A", True, True),
        ("A", "It is type A.", True, False),
        ("A", "B", False, False),
        ("the", "a", False, False),
        ("!!!", "", False, False),
        ("!!!", "It is !!! here", True, False),
        ("the lamp", "Lamp", True, True),
    ],
)
def test_right_answers_of_articles_or_signs_alone(
    right: str, said: str, held: bool, exact: bool, tmp_path: Path
) -> None:
    task = PassagesTask.read(written(tmp_path, {**PLAIN, "answers": [right]}))
    found = scored(task, record(task, said))
    assert (found["contains"], found["exact"]) == (100.0 * held, 100.0 * exact)
    assert found["not_mentioned"] == 100.0 * (not held and said in ("", "A", "a"))
