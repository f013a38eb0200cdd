"""Sentences of answers: where they begin and end."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rag_windows.sentences import sentences


def said(text: str) -> list[str]:
    return [text[start:end] for start, end in sentences(text)]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("Dr. Ada Brandt lives in St. Orla. It costs 3.5 kr, e.g. here (see p. 4). Why?", 3),
        ("这是第一句。这是第二句？", 2),
        ("هل هذا سؤال؟ نعم. هذا جواب.", 3),
        ("यह पहला वाक्य है। यह दूसरा है।", 2),
        ("One line\nand another", 2),
        ("no end", 1),
        ("", 0),
        (" \n\t\n", 0),
    ],
)
def test_marks_of_many_languages_and_abbreviations(text: str, wanted: int) -> None:
    assert len(said(text)) == wanted


def test_entries_of_lists_and_rows_of_tables_are_sentences_with_their_marks() -> None:
    text = "Two things:\n- first. It is red.\n- second\n2. third!\n# Head\n| a. | B. C. |\n"
    assert said(text) == [
        "Two things:",
        "- first.",
        "It is red.",
        "- second",
        "2. third!",
        "# Head",
        "| a. | B. C. |",
    ]


@pytest.mark.parametrize("fence", ["```python\nx = a.b. c\n\ny = 1\n```", "~~~\nOne. Two.\n~~~"])
def test_a_block_of_code_is_one_sentence(fence: str) -> None:
    assert said(f"Run this. Then wait.\n\n{fence}\nDone.") == [
        "Run this.",
        "Then wait.",
        fence,
        "Done.",
    ]
    assert said(f"Open:\n{fence[:-3]}") == ["Open:", fence[:-3].rstrip()]


@given(st.text(max_size=60) | st.text(alphabet=" .!?\r\n\x0c\u2028-`~#aB。🎉\ud800", max_size=60))
def test_sentences_cover_all_but_space_in_order(text: str) -> None:
    end = 0
    for start, stop in sentences(text):
        assert end <= start < stop <= len(text)
        assert not text[end:start].strip()
        assert text[start:stop] == text[start:stop].strip()
        end = stop
    assert not text[end:].strip()
