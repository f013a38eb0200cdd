from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rag_windows.prompt.visible_text import encodable, one_line, visible


def test_visible() -> None:
    assert visible("a\tb\nü 東 😀 \x1b[0m \r \x9b \u202e \ud800") == (
        "a\tb\nü 東 😀 \\x1b[0m \\x0d \\x9b \\u202e \\ud800"
    )


@given(st.text())
def test_nothing_that_a_terminal_obeys_is_left(text: str) -> None:
    shown = visible(text)
    assert all(char in "\t\n" or char.isprintable() or ord(char) > 0x9F for char in shown)
    assert visible(shown) == shown


def test_pieces_are_the_whole() -> None:
    text = "a\x1b[31m\r\nb\u2028"
    assert "".join(map(visible, text)) == visible(text)


def test_one_line() -> None:
    assert one_line(" a\n\tb  c\x07\u2029") == "a b c\\x07"


def test_encodable() -> None:
    assert encodable("caf\udce9 ü") == "caf\ufffd ü"
    assert encodable("\ud83d\ude00 \ud83d") == "😀 \ufffd"
