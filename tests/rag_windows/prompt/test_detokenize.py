"""From tokens to text that is never taken back, and text of others made harmless to show."""

from __future__ import annotations

import copy
import functools
import random
import statistics
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from rag_windows import visible_text
from rag_windows.prompt.detokenize import Detokenizer, Pieces, TextStream, cut
from rag_windows.sampling import StopStrings
from tests.fixtures_tokenizers import BYTES, NAMES, SENTENCES, build
from tests.rag_windows import small

DECODERS: dict[str, tuple[Any, bool]] = {
    "no decoder": (None, True),
    "metaspace": (decoders.Metaspace(), True),
    "word ends": (decoders.BPEDecoder(), True),
    "word pieces": (decoders.WordPiece(), True),
    "metaspace and bytes": (
        decoders.Sequence([decoders.Metaspace(), decoders.ByteFallback(), decoders.Fuse()]),
        True,
    ),
    "bytes without an end": (
        decoders.Sequence([decoders.ByteFallback(), decoders.Strip("a", 2, 0)]),
        False,
    ),
    "two letters off the start": (
        decoders.Sequence([decoders.ByteFallback(), decoders.Fuse(), decoders.Strip("a", 2, 0)]),
        False,
    ),
    "repeated once": (decoders.CTC(), False),
}
"""Decoders, and whether a few tokens of context are known to be enough for them."""


@functools.cache
def decoded_by(name: str) -> Any:
    """A tokenizer of whole words with a decoder of `DECODERS`."""
    words = ["<unk>", "</s>", *BYTES, *"a b ▁ ▁a a▁b c</w> ##d e.  f \ufffd".split(" ")]
    vocabulary = {word: index for index, word in enumerate(dict.fromkeys(words))}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    if (decoder := DECODERS[name][0]) is not None:
        backend.decoder = decoder
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="</s>", clean_up_tokenization_spaces=False
    )


def tokenizer_of(name: str) -> Any:
    """Of `DECODERS`, of the families in real life, or the one of single bytes."""
    if name in DECODERS:
        return decoded_by(name)
    return small.tokenizer() if name == "single bytes" else build(name)


def likely_ids(tokenizer: Any) -> st.SearchStrategy[int]:
    """Tokens; often bytes and control tokens, which are what makes decoding hard."""
    spelled = [f"<0x{byte:02X}>" for byte in " a€ é".encode()]
    spelled += [str(tokenizer.eos_token), "▁", "a"]
    hard = [tokenizer.backend_tokenizer.token_to_id(token) for token in spelled]
    hard = [id_ for id_ in hard if id_ is not None]
    # The last of them is an id without a token, as a model's padded vocabulary has.
    every = st.integers(0, len(tokenizer))
    return st.one_of(every, st.sampled_from(hard)) if hard else every


def settled(tokenizer: Any, ids: Sequence[int]) -> str:
    """What no token can change that follows, made out of all tokens at once."""
    left_out = {*tokenizer.all_special_ids, *map(tokenizer.convert_tokens_to_ids, BYTES)}
    keep = len(ids)
    while keep and (ids[keep - 1] in left_out or ids[keep - 1] >= len(tokenizer)):
        keep -= 1
    return Detokenizer(tokenizer).text(ids[:keep]).removesuffix("\ufffd")


STOPS = ["a", "the", "s the", "\ufffd", "\ufffd\ufffd", "€", " ", "cats"]


@pytest.mark.parametrize("name", [*NAMES, *DECODERS, "single bytes"])
@given(data=st.data())
def test_a_stream_is_the_whole_text_and_nothing_of_it_is_taken_back(
    name: str, data: st.DataObject
) -> None:
    tokenizer = tokenizer_of(name)
    detokenizer = Detokenizer(tokenizer)
    chunks = data.draw(st.lists(st.lists(likely_ids(tokenizer), max_size=4), max_size=25))
    whole = detokenizer.text([id_ for chunk in chunks for id_ in chunk])
    stops = st.sampled_from(STOPS)
    if whole:
        begins = st.integers(0, len(whole) - 1)
        stops |= st.builds(lambda at, size: whole[at : at + size], begins, st.integers(1, 6))
    stop = data.draw(st.lists(stops, max_size=2))
    stream = TextStream(detokenizer, stop)
    sent, ids = "", list[int]()
    for chunk in chunks:
        sent += stream.feed(chunk)
        ids += chunk
        text = detokenizer.text(ids)
        assert stream.stopped == any(string in text for string in stop)
        assert cut(text, stop).startswith(sent)
        if stream.stopped:
            break
        if not stop:
            assert sent.startswith(settled(tokenizer, ids))
    assert cut(detokenizer.text(ids), stop).startswith(sent)
    if stop and not stream.stopped:
        # What is held back could all become a stop string.
        without = TextStream(detokenizer).feed(ids)
        held = without.removeprefix(sent)
        assert without == sent + held
        assert not held or any(string.startswith(held) for string in stop)


@pytest.mark.parametrize("name", [*NAMES, *DECODERS, "single bytes"])
@given(data=st.data())
def test_tokens_have_their_places_in_the_text_in_order(name: str, data: st.DataObject) -> None:
    tokenizer = tokenizer_of(name)
    ids = data.draw(st.lists(likely_ids(tokenizer), max_size=12))
    detokenizer = Detokenizer(tokenizer)
    text = detokenizer.text(ids)
    end = 0
    for start, stop in detokenizer.spans(ids, text):
        assert end == start <= stop <= len(text)
        end = stop
    if not DECODERS.get(name, (None, True))[1]:
        return
    # An end that could still change is nobody's.
    assert len(text) - end <= len(ids)


@pytest.mark.parametrize("name", ["llama3", "llama2", "gpt2"])
def test_a_token_stands_where_its_word_does(name: str) -> None:
    tokenizer = tokenizer_of(name)
    for text in ("The mill is old. Goats eat 🎉 grass here.", "你好。 Zwei Sätze."):
        ids = tokenizer.encode(text, add_special_tokens=False)
        detokenizer = Detokenizer(tokenizer)
        whole = detokenizer.text(ids)
        spans = detokenizer.spans(ids, whole)
        assert "".join(whole[start:end] for start, end in spans) == whole
        for number, (_, end) in enumerate(spans, start=1):
            so_far = detokenizer.text(ids[:number])
            assert whole[:end].startswith(so_far.rstrip("\ufffd"))


@pytest.mark.parametrize("name", [*NAMES, *DECODERS, "single bytes"])
def test_each_token_is_decoded_a_few_times_however_long_the_answer_is(name: str) -> None:
    tokenizer = copy.deepcopy(tokenizer_of(name))
    decode, decoded = tokenizer.decode, 0

    def counting(ids: list[int], **options: Any) -> Any:
        nonlocal decoded
        decoded += len(ids)
        return decode(ids, **options)

    tokenizer.decode = counting
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.bounded is (DECODERS[name][1] if name in DECODERS else True)
    if not detokenizer.bounded:
        return
    id_of = tokenizer.backend_tokenizer.token_to_id
    runs = [[tokenizer.eos_token_id or 0], [len(tokenizer) - 1]]
    for bytes_ in ("€".encode(), b"\x80"):
        # One token a byte, as tokenizers with byte fallback and those on bytes spell them.
        for spelled in (
            [f"<0x{byte:02X}>" for byte in bytes_],
            map(bytes_to_unicode().get, bytes_),
        ):
            run = [id_of(token) for token in spelled]
            runs += [run] if None not in run else []
    draw = random.Random(0)
    count = 2000
    answers = [[draw.randrange(len(tokenizer)) for _ in range(count)]]
    answers += [(run * count)[:count] for run in runs]
    for ids in answers:
        decoded = 0
        pieces: list[str] = []
        streamer = Pieces(detokenizer, ["no such text", "\n\n\n\n!"], pieces.append)
        for id_ in [0, *ids]:
            streamer.put(torch.tensor([id_]))
        assert decoded <= 9 * count
        assert detokenizer.text(ids).startswith("".join(pieces))


@pytest.mark.timing
@pytest.mark.parametrize("name", ["llama3", "llama2"])
def test_a_token_of_a_long_answer_costs_what_one_of_a_short_one_does(name: str) -> None:
    tokenizer = build(name)
    detokenizer, stop = Detokenizer(tokenizer), ["\n\nQuestion:", "no such text"]
    ids: list[int] = tokenizer(" ".join(SENTENCES), add_special_tokens=False)["input_ids"][:4096]
    assert len(ids) == 4096

    pieces: list[str] = []

    def spent(answers: list[list[int]]) -> float:
        begun = time.thread_time()
        for answer in answers:
            rows = torch.tensor([[0, *answer]])
            streamer, criterion = (
                Pieces(detokenizer, stop, pieces.append),
                StopStrings(detokenizer, stop, 1),
            )
            for count in range(1, rows.shape[1] + 1):
                streamer.put(rows[0, count - 1 : count])
                criterion(rows[:, :count], None)
        return time.thread_time() - begun

    short = [ids[start : start + 64] for start in range(0, len(ids), 64)]
    ratios = [spent([ids]) / spent(short) for _ in range(9)]
    assert statistics.median(ratios) < 1.1


class Retold(PreTrainedTokenizerFast):
    """A class with a decoder of its own."""

    def _decode(self, *args: Any, **options: Any) -> str:
        return super()._decode(*args, **options).replace("aa", "b")


def test_a_class_that_changes_the_text_has_it_decoded_whole() -> None:
    retold = Retold(tokenizer_object=small.tokenizer().backend_tokenizer)
    detokenizer = Detokenizer(retold)
    assert not detokenizer.bounded
    ids = retold("c a", add_special_tokens=False)["input_ids"]
    stream = TextStream(detokenizer, ["b"])
    assert [stream.feed([id_]) for id_ in ids] == ["c", " ", "a"]
    assert not stream.stopped
    stream.feed(ids[-1:])
    assert stream.stopped


def test_bytes_on_both_sides_of_a_special_token_wait_for_each_other() -> None:
    tokenizer = build("llama2")
    ids = tokenizer.convert_tokens_to_ids(["▁s", "<0xE2>", "</s>", "<0x80>"])
    detokenizer = Detokenizer(tokenizer)
    stream = TextStream(detokenizer)
    assert [stream.feed([id_]) for id_ in ids] == ["s", "", "", ""]
    assert detokenizer.text(ids) == "s\ufffd\ufffd"
    space = tokenizer.convert_tokens_to_ids("▁")
    assert stream.feed([space]) == "\ufffd\ufffd "


def test_bytes_that_can_become_no_text_any_more_do_not_wait() -> None:
    tokenizer = build("llama2")
    ids = tokenizer.convert_tokens_to_ids(["<0x41>", "<0xE2>", "<0x41>", "<0x42>", "▁s"])
    stream = TextStream(Detokenizer(tokenizer))
    assert [stream.feed([id_]) for id_ in ids] == ["", "", "\ufffd" * 3, "\ufffd", " s"]


def test_stop_strings_are_found_in_a_run_of_bytes_as_it_would_end_now() -> None:
    tokenizer = build("llama2")

    def stops(stop: str, *chunks: bytes) -> list[bool]:
        stream = TextStream(Detokenizer(tokenizer), [stop])
        found = []
        for chunk in chunks:
            stream.feed(tokenizer.convert_tokens_to_ids([f"<0x{byte:02X}>" for byte in chunk]))
            found.append(stream.stopped)
        return found

    assert stops("€", b"\xe2", b"\x82", b"\xac") == [False, False, True]
    assert stops("a", b"b", b"a\xff", b"a") == [False, False, False]
    assert stops("b\ufffd", b"b", b"\xe2") == [False, False]
    assert stops("\ufffd" * 3, b"b", b"\xe2", b"\x82") == [False, False, True]
    # The tokenizer leaves the space out with which a text begins.
    assert stops(" ", b" ", b"a", b" ") == [False, False, True]


def test_an_unfinished_character_and_a_possible_stop_string_wait() -> None:
    tokenizer = small.tokenizer()
    detokenizer = Detokenizer(tokenizer)

    def pieces(text: str, *stop: str) -> list[str]:
        stream = TextStream(detokenizer, stop)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        return [stream.feed([id_]) for id_ in ids]

    assert pieces("aé") == ["a", "", "é"]
    assert pieces("a sto", "stop") == ["a", " ", "", "", ""]
    assert pieces("a stone", "stop") == ["a", " ", "", "", "", "ston", "e"]
    assert pieces("a stone", "one") == ["a", " ", "s", "t", "", "", ""]
    assert cut("a stone", ["stop", "one"]) == "a st"
    assert cut("a stone", ["one", "ton"]) == "a s"


@pytest.mark.parametrize("name", ["gpt2", "llama2", "bert"])
@pytest.mark.parametrize("changing", [False, True], ids=["rows stay", "rows change places"])
def test_rows_stop_where_the_text_of_all_their_tokens_holds_a_stop_string(
    name: str, changing: bool
) -> None:
    detokenizer = Detokenizer(tokenizer := build(name))
    draw = random.Random(7)
    few = [draw.randrange(len(tokenizer)) for _ in range(6)]
    stop = [detokenizer.text(few[:2])[-3:] or "x", "\ufffd\ufffd"]
    criterion = StopStrings(detokenizer, stop, 1)
    rows = torch.zeros(4, 1, dtype=torch.int64)
    stopped = 0
    for _ in range(40):
        if changing:
            rows = rows[[draw.randrange(4) for _ in range(4)]]
        new = torch.tensor([[draw.choice(few)] for _ in range(4)])
        rows = torch.cat([rows, new], dim=1)
        done = criterion(rows, None)
        texts = [detokenizer.text(row) for row in rows[:, 1:].tolist()]
        assert done.tolist() == [any(string in text for string in stop) for text in texts]
        stopped += int(done.sum())
    assert stopped


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
