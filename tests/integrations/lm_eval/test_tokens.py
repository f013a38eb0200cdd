"""Prompts are cut between tokens, and the parts hold the tokens of the whole."""

from __future__ import annotations

import pytest

pytest.importorskip("lm_eval")

from hypothesis import given
from hypothesis import strategies as st

from lm_eval_rag_windows.prompts import Cut, Cutter, common_length
from rag_windows.integration import Boundary, Piece
from tests.fixtures_tokenizers import build

NAMES = ["gpt2", "llama3", "llama2", "gemma", "unigram"]
TEXT = "Words  of a kind.\n\nQuestion: what?\nAnswer: water\n\n\n Say more: the sea\n\nSo:"


def cutter(name: str) -> Cutter:
    tokenizer = build(name).tokenizer
    return Cutter(tokenizer, Boundary(tokenizer), add_bos_token=None, bos="<s>")


def joined(cut: Cut) -> tuple[int, ...]:
    return (*cut.prefix, *(i for window in cut.windows for i in window), *cut.question)


@pytest.mark.parametrize("name", NAMES)
@given(ends=st.lists(st.integers(0, len(TEXT)), min_size=1, max_size=6).map(sorted))
def test_wherever_it_is_cut(name: str, ends: list[int]) -> None:
    made = cutter(name)
    cut = made.cut((Piece(TEXT),), tuple(ends))
    assert joined(cut) == made.text(TEXT)
    assert cut.question
    assert all(cut.windows)


@pytest.mark.parametrize("end", range(1, len(TEXT)))
def test_a_token_over_an_end_goes_to_the_later_part(end: int) -> None:
    made = cutter("gpt2")
    cut = made.cut((Piece(TEXT),), (end,))
    before = build("gpt2").tokenizer.decode(cut.prefix)
    assert TEXT.startswith(before)
    assert len(before) <= end
    if TEXT[end - 1 : end + 1] in ("\nQ", "\nA", "\nS"):
        assert len(before) == end


def test_line_breaks_before_a_letter_close_the_earlier_part() -> None:
    """GPT-2 writes them as two tokens there, and as one token at the end of a text."""
    tokenizer = build("gpt2").tokenizer
    first, second = "lunk: Daxa\n\n", "blog:"
    cut = cutter("gpt2").cut((Piece(first + second),), (0, len(first)))
    assert tokenizer.decode(cut.windows[0]) == first
    assert list(cut.windows[0]) != tokenizer.encode(first, add_special_tokens=False)


def test_the_beginning_is_not_written_twice() -> None:
    tokenizer = build("gemma").tokenizer
    made = cutter("gemma")
    bos = tokenizer.bos_token_id
    assert made.text("Say").count(bos) == 1
    assert made.ids([Piece("<s>", trusted=True), Piece("Say")]).count(bos) == 1
    # Spelled by a text, it is no beginning, so the true one is not left out.
    assert made.text("<s>Say")[0] == bos
    assert made.text("<s>Say").count(bos) == 1


def test_common_length() -> None:
    assert common_length("abc", "abd") == 2
    assert common_length("ab", "abc") == 2
    assert common_length((), (1,)) == 0
