"""Prompts are cut between tokens, and the parts hold the tokens of the whole."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

pytest.importorskip("lm_eval")

from hypothesis import given
from hypothesis import strategies as st

from rag_windows.integration import Piece
from tests.fixtures_tokenizers import build
from tests.integrations.lm_eval.models import ours

TEXT = "Words  of a kind.\n\nQuestion: what?\nAnswer: water\n\n\n Say more: the sea\n\nSo:"


@cache
def prompts(name: str) -> Any:
    return ours(name).prompts


@pytest.mark.parametrize("name", ["gpt2", "llama3", "llama2", "gemma", "unigram"])
@given(ends=st.lists(st.integers(0, len(TEXT)), min_size=1, max_size=6).map(sorted))
def test_wherever_it_is_cut(name: str, ends: list[int]) -> None:
    made = prompts(name)
    cut = made.cut_at((Piece(TEXT),), tuple(ends))
    assert (*cut.prefix, *(i for one in cut.windows for i in one), *cut.question) == made.text(TEXT)
    assert cut.question
    assert all(cut.windows)


def test_a_token_over_an_end_goes_to_the_later_part() -> None:
    made = prompts("gpt2")
    for end in range(1, len(TEXT)):
        before = build("gpt2").tokenizer.decode(made.cut_at((Piece(TEXT),), (end,)).prefix)
        assert TEXT.startswith(before)
        assert len(before) <= end
        if TEXT[end - 1 : end + 1] in ("\nQ", "\nA", "\nS"):
            assert len(before) == end


def test_line_breaks_before_a_letter_close_the_earlier_part() -> None:
    """GPT-2 writes them as two tokens there, and as one token at the end of a text."""
    tokenizer = build("gpt2").tokenizer
    first, second = "lunk: Daxa\n\n", "blog:"
    cut = prompts("gpt2").cut_at((Piece(first + second),), (0, len(first)))
    assert tokenizer.decode(cut.windows[0]) == first
    assert list(cut.windows[0]) != tokenizer.encode(first, add_special_tokens=False)


def test_the_beginning_is_not_written_twice() -> None:
    bos, made = build("gemma").tokenizer.bos_token_id, prompts("gemma")
    written = build("gemma").tokenizer.bos_token
    assert made.text("Say").count(bos) == 1
    assert made.ids([Piece(written, trusted=True), Piece("Say")]).count(bos) == 1
    # Spelled by a text, it is no beginning, so the true one is not left out.
    assert made.text(f"{written}Say")[0] == bos
    assert made.text(f"{written}Say").count(bos) == 1
