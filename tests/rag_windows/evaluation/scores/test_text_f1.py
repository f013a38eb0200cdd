from __future__ import annotations

import random
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rag_windows.evaluation.metrics import bag_f1, chatrag_words, squad_words
from tests.rag_windows.evaluation.scores import literal

WORDS = st.lists(st.sampled_from("one two three four the".split()), max_size=8)
LETTERS = st.text("aAnNtThHeE .,'-_“”é\u00a0\u2028\n", max_size=30) | st.text(max_size=30)


@pytest.mark.parametrize(
    ("text", "squad", "chatrag"),
    [
        ("The cat sat on a mat.", ["cat", "sat", "on", "mat"], ["cat", "sat", "on", "mat"]),
        ("don't", ["dont"], ["don", "t"]),
        ("well-known A/B", ["wellknown", "ab"], ["well", "known", "b"]),
        ("An ‘a’ in “the”", ["‘", "’", "in", "“", "”"], ["‘", "’", "in", "“", "”"]),
        ("snake_case", ["snakecase"], ["snake", "case"]),
        ("?! ...", [], []),
        ("", [], []),
        ("the A an", [], []),
        ("ÜBER\u00a0Ñ", ["über", "ñ"], ["über", "ñ"]),
        ("anthem theatre", ["anthem", "theatre"], ["anthem", "theatre"]),
        ("3,000.50", ["300050"], ["3", "000", "50"]),
    ],
)
def test_words(text: str, squad: list[str], chatrag: list[str]) -> None:
    assert squad_words(text) == squad
    assert chatrag_words(text) == chatrag


def test_both_take_out_the_32_ascii_marks_and_no_others() -> None:
    assert set(literal.PUNCTUATION) == set(string.punctuation)
    for letter in map(chr, range(33, 0x3000)):
        if letter.isspace():
            continue
        taken = letter in string.punctuation
        assert squad_words(f"x{letter}y") == (["xy"] if taken else [f"x{letter.lower()}y"])
        assert chatrag_words(f"x{letter}y") == (["x", "y"] if taken else [f"x{letter.lower()}y"])


@given(LETTERS)
def test_words_agree_with_the_literal_ones(text: str) -> None:
    assert chatrag_words(text) == literal.chatrag_words(text)


def test_f1_by_hand() -> None:
    # Two of three words are right, two of four are found: 2 * (2/3) * (1/2) / (2/3 + 1/2).
    assert bag_f1(["x", "y", "z"], ["x", "y", "u", "v"]) == pytest.approx(4 / 7)
    # A word counts as often as both sides have it.
    assert bag_f1(["x", "x", "x"], ["x", "x", "y"]) == pytest.approx(2 / 3)
    assert bag_f1(["x"], ["y"]) == 0


def test_f1_of_sides_without_words() -> None:
    assert bag_f1([], []) == 0
    assert bag_f1([], [], both_empty=1.0) == 1
    assert bag_f1([], ["x"], both_empty=1.0) == 0
    assert bag_f1(["x"], [], both_empty=1.0) == 0


@given(WORDS, WORDS, st.randoms(use_true_random=False))
def test_f1_is_symmetric_bounded_and_blind_to_order(
    one: list[str], other: list[str], chance: random.Random
) -> None:
    found = bag_f1(one, other)
    assert found == bag_f1(other, one)
    assert 0 <= found <= 1
    assert (found == 1) == (sorted(one) == sorted(other) and bool(one))
    assert found == bag_f1(chance.sample(one, len(one)), chance.sample(other, len(other)))
    assert found == pytest.approx(literal.f1(one, other, 0.0))
    squad = bag_f1(one, other, both_empty=1.0)
    assert squad == pytest.approx(literal.f1(one, other, 1.0))
