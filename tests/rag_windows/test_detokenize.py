"""From tokens to text that is never taken back, and text of others made harmless to show."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rag_windows.prompt import visible_text
from rag_windows.prompt.detokenize import Detokenizer
from tests.fixtures_tokenizers import build
from tests.rag_windows import small

TOKENIZERS = {"byte level": small.tokenizer(), "byte fallback": build("llama2")}
STOPS = st.lists(st.sampled_from(["a", "the", "s the", "\ufffd", "€", "cats"]), max_size=2)


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data(), stop=STOPS)
def test_settled_text_is_never_taken_back(name: str, data: st.DataObject, stop: list[str]) -> None:
    tokenizer = TOKENIZERS[name]
    pick = st.integers(0, len(tokenizer) - 1)
    if name == "byte fallback":
        euro = tokenizer.convert_tokens_to_ids([f"<0x{byte:02X}>" for byte in "€".encode()])
        pick = st.one_of(pick, st.sampled_from([*euro, tokenizer.eos_token_id]))
    ids = data.draw(st.lists(pick, max_size=25))
    detokenizer = Detokenizer(tokenizer)
    settled = ""
    for count in range(len(ids) + 1):
        now = detokenizer.settled(ids[:count], stop)
        if detokenizer.find_stop(ids[:count], stop):
            break
        assert now.startswith(settled)
        settled = now
    assert detokenizer.text(ids[:count], stop).startswith(settled)


def test_bytes_on_both_sides_of_a_special_token_wait_for_each_other() -> None:
    tokenizer = TOKENIZERS["byte fallback"]
    ids = tokenizer.convert_tokens_to_ids(["▁s", "<0xE2>", "</s>", "<0x80>"])
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.settled(ids[:n]) for n in range(5)] == ["", *["s"] * 4]
    assert detokenizer.text(ids) == "s\ufffd\ufffd"


def test_an_unfinished_character_and_a_possible_stop_string_wait() -> None:
    detokenizer = Detokenizer(small.tokenizer())
    ids = small.tokenizer()("aé", add_special_tokens=False)["input_ids"]
    assert [detokenizer.settled(ids[:n]) for n in range(4)] == ["", "a", "a", "aé"]
    ids = small.tokenizer()("a stone", add_special_tokens=False)["input_ids"]
    assert detokenizer.settled(ids[:4], ["stop"]) == "a "
    assert detokenizer.settled(ids, ["stop"]) == "a stone"
    assert detokenizer.text(ids, ["one"]) == "a st"
    assert detokenizer.settled(ids, ["one"]) == "a st"


@given(st.text())
def test_nothing_that_a_terminal_obeys_is_left(text: str) -> None:
    shown = visible_text.visible(text)
    assert all(char in "\t\n" or char.isprintable() or ord(char) > 0x9F for char in shown)
    assert visible_text.visible(shown) == shown == "".join(map(visible_text.visible, text))


def test_what_a_terminal_obeys_is_spelled_out() -> None:
    assert visible_text.visible("a\tb\nü 東 😀 \x1b[0m \r \x9b \u202e \ud800") == (
        "a\tb\nü 東 😀 \\x1b[0m \\x0d \\x9b \\u202e \\ud800"
    )
    assert visible_text.one_line(" a\n\tb  c\x07\u2029") == "a b c\\x07"
    assert visible_text.encodable("caf\udce9 \ud83d\ude00 \ud83d") == "caf\ufffd 😀 \ufffd"
