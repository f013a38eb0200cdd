"""Where needles come from: the samples, texts of a folder, a file."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from rag_windows import DataError, DocumentError, InputError
from rag_windows.evaluation.long import (
    LongOptions,
    LongTask,
    file_needles,
    invented_needles,
    sample_needles,
)
from rag_windows.evaluation.record import digest_of
from rag_windows.passage import Passage


def test_samples_hide_an_entry_among_others() -> None:
    made = sample_needles(12, 40, 0)
    assert made == sample_needles(12, 40, 0)
    assert made.needles != sample_needles(12, 40, 1).needles
    assert len({one.key for one in made.needles}) == 12
    for needle in made.needles:
        title = needle.passage.title
        assert title is not None
        assert title in needle.question
        assert needle.answers[0] in needle.passage.text
        assert len({one.text for one in needle.haystack}) == 40
        assert not any(title in f"{one.title} {one.text}" for one in needle.haystack)
    with pytest.raises(InputError, match="The samples have 80 questions, not 81"):
        sample_needles(81, 4, 0)


def test_haystacks_are_nested() -> None:
    few = {one.key: one.haystack for one in sample_needles(5, 7, 3).needles}
    many = {one.key: one.haystack for one in sample_needles(5, 60, 3).needles}
    assert all(many[key][:7] == haystack for key, haystack in few.items())


def texts(folder: Path, count: int = 6) -> Path:
    for number in range(count):
        words = " ".join(f"Word{number}x{i} stays here." for i in range(40))
        (folder / f"{number}.txt").write_text(words, encoding="utf-8")
    return folder


def test_invented_needles_stand_inside_texts(tmp_path: Path) -> None:
    options = LongOptions(sizes=(1, 5), questions=8, passage_words=60)
    task = LongTask.open(haystack=texts(tmp_path), options=options)
    assert task.prefix is not None
    assert task.name == f"long/{tmp_path.name}"
    again = LongTask.open(haystack=tmp_path, options=options)
    assert again.examples == task.examples
    assert again.settings == task.settings
    assert len({needle.question for needle in task.needles.needles}) == 8
    for needle in task.needles.needles:
        (code,) = needle.answers
        name = re.fullmatch(r"What is the secret number of (\w+ \w+)\?", needle.question)
        assert name is not None
        sentence = f"The secret number of {name[1]} is {code}."
        before, _, behind = needle.passage.text.partition(sentence)
        assert len(before) > 50
        assert len(behind) > 50
        assert before.endswith("here. ")
        assert not any(code in one.text or name[1] in one.text for one in needle.haystack)
    (tmp_path / "0.txt").write_text("Another text.", encoding="utf-8")
    assert LongTask.open(haystack=tmp_path, options=options).settings != task.settings


def test_names_and_numbers_of_the_texts_are_not_invented() -> None:
    pool = [Passage(" ".join(map(str, range(10_000, 99_999)))), Passage("b")]
    (needle,) = invented_needles(pool[1:], "x", 1, 0, 0).needles
    (other,) = invented_needles([Passage(f"It is {needle.answers[0]}.")], "x", 1, 0, 0).needles
    assert needle.answers != other.answers
    with pytest.raises(InputError, match="No name or number is left to invent"):
        invented_needles([Passage(f"{pool[0].text} 99999")], "x", 1, 0, 0)
    with pytest.raises(InputError, match="x holds no passages"):
        invented_needles([], "x", 1, 0, 0)


def test_a_folder_without_texts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DocumentError):
        LongTask.open(haystack=tmp_path)
    with pytest.raises(InputError, match="A passage has at least 1 word, not 0"):
        LongTask.open(haystack=tmp_path, options=LongOptions(passage_words=0))


def write(path: Path, *lines: Any) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def line(number: int, **more: Any) -> dict[str, Any]:
    return {"question": f"q{number}?", "answer": f"a{number}", "needle": f"n{number}", **more}


def test_a_file_brings_needles_and_haystacks(tmp_path: Path) -> None:
    own = ["h1", {"text": "h2", "id": "two", "title": "T"}, "h3"]
    path = write(tmp_path / "some.jsonl", line(1, haystack=own), *(line(i) for i in range(2, 6)))
    task = LongTask.open(path, options=LongOptions(sizes=(4, 2)))
    first = task.examples[0]
    assert [one.key for one in task.examples[:6]] == [
        "1/2/0",
        "1/2/1",
        *(f"1/4/{i}" for i in range(4)),
    ]
    assert [one.text for one in first.passages or ()] == ["n1", "h1"]
    last = task.examples[5].passages or ()
    assert [(one.text, one.id, one.title) for one in last] == [
        ("h1", "1/1", None),
        ("h2", "two", "T"),
        ("h3", "1/3", None),
        ("n1", "needle 1", None),
    ]
    assert first.details["needle"] == digest_of("n1")
    others = {one.text for one in task.examples[-1].passages or ()}
    assert others < {f"n{i}" for i in range(1, 6)}
    assert "n5" in others
    assert (task.name, task.prefix, task.settings["questions"]) == ("long/some", None, 5)
    with pytest.raises(InputError, match=r"6 passages need 5 beside .* '1' of some has 3"):
        LongTask.open(path, options=LongOptions(sizes=(6,)))
    assert len(LongTask.open(path, options=LongOptions(sizes=(1,), questions=2)).examples) == 2


def test_a_file_is_hidden_in_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    path = write(tmp_path / "some.jsonl", line(1))
    options = LongOptions(sizes=(4,), passage_words=60)
    task = LongTask.open(path, haystack=texts(folder), options=options)
    assert all("stays here" in one.text for one in task.needles.needles[0].haystack)
    assert "haystack" in task.settings["data"]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([{"question": "q", "answer": "a"}], "line 1, needle: Field required"),
        ([{"question": "q", "needle": "n"}], "line 1, answers: Field required"),
        ([line(1, question=" ")], "line 1: the question or an answer is blank"),
        ([line(1, answers=[])], "line 1, answers: List should have at least 1 item"),
        ([line(1, answers=["a", ""])], "line 1: the question or an answer is blank"),
        ([line(1, answers="a")], "line 1, answers: Input should be a valid array"),
        ([line(1, needle=" ")], "line 1, needle: a passage is blank"),
        ([line(1, needle={"title": "t"})], "line 1, needle, text: Field required"),
        ([line(1, needle=[])], "line 1, needle: Input should be an object"),
        ([line(1, haystack="h")], "line 1, haystack: Input should be a valid array"),
        ([line(1, haystack=["h", 3])], "line 1, haystack 2: Input should be an object"),
        ([line(1, haystack=["h", "n1"])], 'entry 2 of "haystack" equals the needle'),
        ([line(1, haystack=["h", "g", "h"])], 'entry 3 of "haystack" equals entry 1;'),
        ([line(1, id="x"), line(2, id="x")], """line 2: the "id" 'x' stands in line 1 too"""),
    ],
)
def test_a_line_that_is_wrong_is_named(tmp_path: Path, lines: list[Any], message: str) -> None:
    with pytest.raises(DataError, match=message) as error:
        file_needles(write(tmp_path / "a.jsonl", *lines), None, None, 3, 0)
    assert "a.jsonl, line" in str(error.value)
