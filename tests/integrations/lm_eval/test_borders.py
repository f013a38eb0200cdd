"""Examples are found in prompts that came as one string; text is never changed by it."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("lm_eval")

from hypothesis import given
from hypothesis import strategies as st

from lm_eval_rag_windows.prompts import Borders, find_borders

BLANK = "\n\n"


def parts(text: str, delimiter: str = BLANK, **options: Any) -> list[str]:
    """Description, examples, question."""
    borders = find_borders(text, delimiter, **options)
    cuts = [borders.start, *borders.ends]
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, None], strict=True)]


ASKED = ["Question: a?\nAnswer: b\n\n", "Question: c?\nAnswer: d\n\n", "Question: e?\nAnswer:"]
LONG = [
    "Question: a\n\nb?\nAnswer: c\n\n",
    "Question: d\n\ne?\nAnswer: f\n\n",
    "Question: g\n\nh?\nAnswer:",
]


@pytest.mark.parametrize("shots", [None, 2])
@pytest.mark.parametrize(
    "expected",
    [
        pytest.param(["", *ASKED], id="examples end like the question"),
        pytest.param(["Answer well.\n\n", *ASKED], id="a description before them"),
        pytest.param(["", *LONG], id="blank lines within every example"),
        pytest.param(
            ["Do it.\n\n", "a\n\nAnswer: b\n\n", "c\n\nAnswer: d\n\n", "e\n\nAnswer:"],
            id="a common ending may stand alone",
        ),
        pytest.param(
            ["", "lunk: Daxa\n\n", "blog: Fepor\n\n", "gidra:"], id="no common ending: parts"
        ),
    ],
)
def test_examples_are_told_apart(expected: list[str], shots: int | None) -> None:
    assert parts("".join(expected), shots=shots) == expected


def test_a_question_that_begins_an_example_is_no_common_ending() -> None:
    assert len(parts("lunk: Daxa\n\nblog: Fepor\n\ngidra: Daxa\n\nblog:")) == 5


def test_blank_lines_of_the_own_document_belong_to_the_question() -> None:
    passage = "The first paragraph is long enough.\n\nThe second one is as long as that."
    text = f"{passage}\n\nWho said so?"
    assert find_borders(text, BLANK, doc={"passage": passage, "n": 3}) == Borders()
    shown = f"Other words.\n\nWho?: he\n\n{text}"
    assert parts(shown, doc={"nested": [{"passage": passage}]})[-1] == text


def test_the_count_of_examples_decides() -> None:
    text = "one two\n\nthree: x\n\nfour\n\nfive: y\n\nsix\n\nseven:"
    assert len(parts(text)) == 7
    counted = ["", "one two\n\nthree: x\n\n", "four\n\nfive: y\n\n", "six\n\nseven:"]
    assert parts(text, shots=2) == counted
    assert find_borders(text, BLANK, shots=0) == Borders()
    assert parts("a: b###c: d###e:", "###") == ["", "a: b###", "c: d###", "e:"]


@given(
    st.text(alphabet="ab:\n ", max_size=60),
    st.one_of(st.none(), st.integers(0, 5)),
    st.text(alphabet="ab\n", max_size=40),
)
def test_whatever_is_found_the_text_stays(text: str, shots: int | None, value: str) -> None:
    found = find_borders(text, BLANK, shots=shots, doc={"value": value})
    assert "".join(parts(text, shots=shots, doc={"value": value})) == text
    assert [found.start, *found.ends] == sorted({found.start, *found.ends})
    assert not found.ends or text[found.ends[-1] :].strip()
    if shots is not None and found.ends and text.count(BLANK) == shots:
        assert len(found.ends) == shots
