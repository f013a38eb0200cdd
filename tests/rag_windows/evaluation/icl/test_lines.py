"""Tasks from local files, and what is said of files that can't be used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rag_windows import DataError, InputError
from rag_windows.evaluation.icl_data import NAMED, Items, worded
from rag_windows.evaluation.icl_data import from_files as load


def write(path: Path, *lines: Any) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def row(text: str, label: Any, split: str | None = None, **more: Any) -> dict[str, Any]:
    return {"text": text, "label": label, **({} if split is None else {"split": split}), **more}


def choice(answer: Any, split: str | None = None, **more: Any) -> dict[str, Any]:
    made = {"question": "Which is red?", "choices": ["grass", "blood"], "answer": answer, **more}
    return made if split is None else {**made, "split": split}


def labels(items: Items) -> list[tuple[str, str, str]]:
    return [(one.key, one.text, one.label) for one in items.test]


def test_one_file_names_its_splits(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.jsonl",
        row("b", "dog", "train"),
        row("c", "cat", "test", id="x"),
        row("a", "cat", "train"),
        row("d", 7, "train"),
        row("e", "7", "test", label_text="kept out"),
    )
    items = load(path)
    assert items.kind == "classification"
    assert items.labels == ("dog", "cat", "7")
    assert [one.text for one in items.demonstrations] == ["b", "a", "d"]
    assert labels(items) == [("x", "c", "cat"), ("5", "e", "7")]
    assert items.stamp["test"]["file"] == "a.jsonl"  # type: ignore[index] # object, for JSON


def test_two_files_need_no_splits(tmp_path: Path) -> None:
    test = write(tmp_path / "test.jsonl", row("a", "x"))
    demos = write(tmp_path / "demos.jsonl", row("b", "y"), row("c", "x"))
    items = load(test, demos)
    assert labels(items) == [("1", "a", "x")]
    assert [one.label for one in items.demonstrations] == ["y", "x"]
    assert set(items.stamp) == {"test", "demonstrations"}


def test_without_demonstrations_labels_are_those_of_the_texts(tmp_path: Path) -> None:
    items = load(write(tmp_path / "test.jsonl", row("a", "x"), row("b", "y")))
    assert items.labels == ("x", "y")
    assert items.demonstrations == ()


def test_multiple_choice_takes_an_answer_or_its_index(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.jsonl",
        choice("grass", "train"),
        choice(1, "test", context="Blood is red."),
        choice("blood", "test", context=" "),
    )
    items = load(path)
    assert items.kind == "multiple choice"
    assert items.labels == ()
    assert [(one.answer, one.label, one.context) for one in items.test] == [
        (1, "blood", "Blood is red."),
        (1, "blood", None),
    ]


def test_a_named_task_takes_words_or_classes(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.jsonl",
        row("a", "ENTY", "train"),
        row("b", "human", "train"),
        row("c", "NUM", "test"),
    )
    items = load(path, name="trec", words=worded("trec", "pcw"))
    assert [one.label for one in items.demonstrations] == ["entity", "human"]
    assert labels(items) == [("3", "c", "numeric")]
    assert items.labels == worded("trec", "pcw").labels
    with pytest.raises(DataError, match=r"line 1: 'fast' is none of the labels \['negative', "):
        load(write(path, row("a", "fast")), name="sst2", words=worded("sst2", "pcw"))
    with pytest.raises(DataError, match="line 1, label, str: Input should be a valid string"):
        load(write(path, row("a", True)), name="sst2", words=worded("sst2", "pcw"))
    with pytest.raises(DataError, match="line 1: sst2 has texts with labels"):
        load(write(path, choice(0)), name="sst2", words=worded("sst2", "pcw"))


GOOD = row("a", "x", "train")


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([{"text": "a"}], 'line 1: "label" is missing'),
        ([{"label": "x"}], 'line 1: "text" is missing'),
        ([row("a", None)], 'line 1: "label" is missing'),
        ([row("a", " ")], 'line 1: "label" is blank'),
        ([row(" \n", "x")], 'line 1: "text" is blank'),
        ([GOOD, row("b", "x", "dev")], "line 2, split: Input should be 'train' or 'test'"),
        ([GOOD, row("b", "x")], 'line 2: "split" is missing; it must be "train" or "test"'),
        ([GOOD, row("b", "y", "test")], "line 2: no demonstration has the label 'y'"),
        ([GOOD], 'no line has "split": "test"'),
        ([GOOD, row("b", "x", "test")], "line 2: all lines have the label 'x'"),
        (
            [row("a", "x", id="n"), row("b", "y", id="n")],
            """line 2: the "id" 'n' stands in line 1""",
        ),
        ([row("a", "x", id=2), row("b", "y")], 'line 2: the "id" .2. stands in line 1'),
        ([row("a", "x", id=1.5)], "line 1, id, str: Input should be a valid string"),
        ([[1]], "record 1: Input should be an object"),
        ([GOOD, choice(0, "test")], "line 1: this is classification, but line 2 of .* is multi"),
        ([choice(2)], r'line 1: "answer" is 2, but indices of 2 choices go from 0 to 1'),
        ([choice(-1)], '"answer" is -1'),
        ([choice("sky")], "\"answer\" 'sky' is none of the choices"),
        ([choice(True)], "line 1, answer, str: Input should be a valid string"),
        ([{"question": "a", "choices": ["b", "c"]}], '"answer" is missing'),
        ([choice(0, choices=["b"])], '"choices" must hold at least two, and all of them different'),
        (
            [choice(0, choices=["b", "b"])],
            '"choices" must hold at least two, and all of them different',
        ),
        ([choice(0, choices=["b", " "])], 'one of the "choices" is blank'),
        ([choice(0, choices=["b", 3])], "line 1, choices 2: Input should be a valid string"),
        ([choice(0, choices="bc")], "line 1, choices: Input should be a valid array"),
        ([choice(0, question=" ")], '"question" is blank'),
        ([choice(0, context=3)], "line 1, context: Input should be a valid string"),
        ([{"choices": ["a", "b"], "answer": 0}], '"question" is missing'),
    ],
)
def test_a_line_that_is_wrong_is_named(tmp_path: Path, lines: list[Any], message: str) -> None:
    with pytest.raises(DataError, match=message) as error:
        load(write(tmp_path / "a.jsonl", *lines))
    assert "a.jsonl" in str(error.value)
    assert "\n" not in str(error.value)


def test_splits_must_agree_with_the_files(tmp_path: Path) -> None:
    test = write(tmp_path / "test.jsonl", row("a", "x", "train"))
    demos = write(tmp_path / "demos.jsonl", row("b", "x"))
    with pytest.raises(DataError, match=r"test.jsonl, line 1: \"split\" is 'train'"):
        load(test, demos)
    with pytest.raises(DataError, match=r"demos.jsonl, line 1: \"split\" is 'test'"):
        load(write(test, row("a", "x")), write(demos, row("b", "x", "test")))


def test_labels_may_be_fixed(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", row("a", "x", "train"), row("b", "y", "test"))
    assert load(path, labels=["z", "y", "x"]).labels == ("z", "y", "x")
    with pytest.raises(DataError, match="line 2: 'y' is none of the labels"):
        load(path, labels=["z", "x"])
    with pytest.raises(InputError, match="multiple choice brings its own"):
        load(write(path, choice(0)), labels=["z", "x"])


def test_a_file_cut_off_is_told(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", row("a", "x", "train"), row("b", "y", "test"))
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match=r"line 2: Invalid JSON: EOF"):
        load(path)


def test_each_named_task_has_a_word_for_each_class() -> None:
    for named in NAMED.values():
        for wording in named.wordings.values():
            assert len(wording.labels) == len(set(wording.labels)) == len(named.classes)
