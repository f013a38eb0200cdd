"""Examples are found in prompts that came as one string; text is never changed by it."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("lm_eval")

from hypothesis import given
from hypothesis import strategies as st

from lm_eval_rag_windows.prompts import Borders, Examples, find_borders
from rag_windows import InputError

BLANK = "\n\n"


def parts(text: str, borders: Borders) -> list[str]:
    """Description, examples, question."""
    cuts = [borders.start, *borders.ends]
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, None], strict=True)]


def asked(*examples: tuple[str, str], question: str, description: str = "") -> str:
    shown = "".join(f"Question: {q}\nAnswer: {a}\n\n" for q, a in examples)
    return f"{description}{shown}Question: {question}\nAnswer:"


def test_examples_that_end_like_the_question() -> None:
    text = asked(("a?", "b"), ("c?", "d"), question="e?")
    assert parts(text, find_borders(text, BLANK)) == [
        "",
        "Question: a?\nAnswer: b\n\n",
        "Question: c?\nAnswer: d\n\n",
        "Question: e?\nAnswer:",
    ]


@pytest.mark.parametrize("shots", [None, 2])
def test_a_description_stands_before_the_examples(shots: int | None) -> None:
    text = asked(("a?", "b"), ("c?", "d"), question="e?", description="Answer well.\n\n")
    found = parts(text, find_borders(text, BLANK, shots=shots))
    assert found[0] == "Answer well.\n\n"
    assert len(found) == 4


@pytest.mark.parametrize("shots", [None, 2])
def test_blank_lines_within_every_example(shots: int | None) -> None:
    text = asked(("a\n\nb?", "c"), ("d\n\ne?", "f"), question="g\n\nh?")
    assert parts(text, find_borders(text, BLANK, shots=shots)) == [
        "",
        "Question: a\n\nb?\nAnswer: c\n\n",
        "Question: d\n\ne?\nAnswer: f\n\n",
        "Question: g\n\nh?\nAnswer:",
    ]


def test_examples_without_a_common_ending_are_parts() -> None:
    text = "lunk: Daxa\n\nblog: Fepor\n\ngidra:"
    assert parts(text, find_borders(text, BLANK)) == [
        "",
        "lunk: Daxa\n\n",
        "blog: Fepor\n\n",
        "gidra:",
    ]


def test_a_question_that_begins_an_example_is_no_common_ending() -> None:
    text = "lunk: Daxa\n\nblog: Fepor\n\ngidra: Daxa\n\nblog:"
    assert len(find_borders(text, BLANK).ends) == 3


def test_a_common_ending_may_stand_alone() -> None:
    text = "Do it.\n\na\n\nAnswer: b\n\nc\n\nAnswer: d\n\ne\n\nAnswer:"
    assert parts(text, find_borders(text, BLANK)) == [
        "Do it.\n\n",
        "a\n\nAnswer: b\n\n",
        "c\n\nAnswer: d\n\n",
        "e\n\nAnswer:",
    ]


def test_blank_lines_of_the_own_document_belong_to_the_question() -> None:
    passage = "The first paragraph is long enough.\n\nThe second one is as long as that."
    text = f"{passage}\n\nWho said so?"
    assert find_borders(text, BLANK, doc={"passage": passage, "n": 3}) == Borders()
    shown = f"Other words.\n\nWho?: he\n\n{text}"
    found = find_borders(shown, BLANK, doc={"nested": [{"passage": passage}]})
    assert parts(shown, found)[-1] == text


def test_the_count_of_examples_decides() -> None:
    text = "one two\n\nthree: x\n\nfour\n\nfive: y\n\nsix\n\nseven:"
    assert len(find_borders(text, BLANK).ends) == 5
    assert parts(text, find_borders(text, BLANK, shots=2)) == [
        "",
        "one two\n\nthree: x\n\n",
        "four\n\nfive: y\n\n",
        "six\n\nseven:",
    ]
    assert find_borders(text, BLANK, shots=0) == Borders()


def test_another_delimiter() -> None:
    text = "a: b###c: d###e:"
    assert parts(text, find_borders(text, "###")) == ["", "a: b###", "c: d###", "e:"]


@given(
    st.text(alphabet="ab:\n ", max_size=60),
    st.one_of(st.none(), st.integers(0, 5)),
    st.text(alphabet="ab\n", max_size=40),
)
def test_whatever_is_found_the_text_stays(text: str, shots: int | None, value: str) -> None:
    found = find_borders(text, BLANK, shots=shots, doc={"value": value})
    assert "".join(parts(text, found)) == text
    assert [found.start, *found.ends] == sorted({found.start, *found.ends})
    assert not found.ends or text[found.ends[-1] :].strip()
    if shots is not None and found.ends and text.count(BLANK) == shots:
        assert len(found.ends) == shots


def test_windows_hold_whole_examples_in_order() -> None:
    ends = [10, 20, 30, 40, 50, 60, 70]
    assert Examples().window_ends(ends) == ends
    assert Examples(each=3).window_ends(ends) == [30, 60, 70]
    assert Examples(windows=3).window_ends(ends) == [20, 40, 70]
    assert Examples(windows=20).window_ends(ends) == ends
    assert Examples(windows=2).window_ends([]) == []


@pytest.mark.parametrize("wrong", [{"windows": 0}, {"each": "two"}])
def test_wrong_numbers_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=r"at least 1, got"):
        Examples(**wrong)
    with pytest.raises(InputError, match="can't both be given"):
        Examples(each=1, windows=1)
