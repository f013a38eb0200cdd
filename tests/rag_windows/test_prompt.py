"""Windows, headers, notes, limits, and the layout of models without a chat template."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from rag_windows import LimitError, PromptError
from rag_windows.passage import Note, Passage, WindowTokens
from rag_windows.prompt.builder import Prompt
from tests.fixtures_tokenizers import build

LONG = "\n\n".join(
    f"Paragraph {i} of the long text. It says little. And it ends here, as promised! Does it?"
    for i in range(40)
)


def _text(tokenizer: Any, window: WindowTokens) -> str:
    return str(tokenizer.decode(window.ids))


@pytest.mark.parametrize(
    ("header", "titled", "untitled"),
    [
        ("none", "A wall.\n\n", "A ship.\n\n"),
        ("title", "Walls\nA wall.\n\n", "A ship.\n\n"),
        ("number", "[1]\nA wall.\n\n", "[2]\nA ship.\n\n"),
        ("number+title", "[1] Walls\nA wall.\n\n", "[2]\nA ship.\n\n"),
        (lambda p, n: f"{p.id}/{n}", "a/1\nA wall.\n\n", "b/2\nA ship.\n\n"),
        (lambda p, n: "", "A wall.\n\n", "A ship.\n\n"),
    ],
)
def test_header(header: Any, titled: str, untitled: str) -> None:
    tokenizer = build("llama3").tokenizer
    passages = [Passage("A wall.", id="a", title="Walls"), Passage("A ship.", id="b")]
    parts = Prompt(tokenizer, header=header).build("Who?", passages)
    assert [_text(tokenizer, window) for window in parts.windows] == [titled, untitled]


def test_unknown_header_and_wrong_header_value_are_refused() -> None:
    tokenizer = build("llama3").tokenizer
    with pytest.raises(PromptError, match="number\\+title"):
        Prompt(tokenizer, header="titles")
    with pytest.raises(PromptError, match="header of passage 0 must be a string, not NoneType"):
        Prompt(tokenizer, header=lambda p, n: None).build("Who?", [Passage("A wall.")])  # type: ignore[arg-type, return-value]  # the mistake under test


def test_blank_and_repeated_passages_make_no_window_and_are_noted() -> None:
    passages = [
        Passage("A wall.", title="Walls"),
        Passage(" \n\t", id="empty", title="Title only"),
        Passage("A wall.", title="Walls", id="again"),
        Passage("A wall."),
        Passage(""),
    ]
    parts = Prompt(build("llama3").tokenizer, header="number").build("Who?", passages)
    assert [window.passage for window in parts.windows] == [0, 3]
    assert [(note.kind, note.passage, note.of) for note in parts.notes] == [
        ("blank", 1, None),
        ("duplicate", 2, 0),
        ("blank", 4, None),
    ]
    assert "'empty'" in parts.notes[0].message
    assert "repeats passage 0" in parts.notes[1].message


def test_only_blank_passages_are_as_no_passages() -> None:
    prompt = Prompt(build("llama3").tokenizer)
    parts = prompt.build("Who?", [Passage(" "), Passage("\n")])
    assert parts.prefix_ids == ()
    assert parts.query_ids == prompt.build("Who?", []).query_ids
    assert len(parts.notes) == 2


def test_a_window_is_the_same_wherever_its_passage_stands() -> None:
    prompt = Prompt(build("llama2").tokenizer)
    one, two = Passage("A wall.", title="Walls"), Passage("A ship.")
    forth, back = prompt.build("Who?", [one, two]), prompt.build("Else?", [two, one])
    assert [w.ids for w in forth.windows] == [w.ids for w in reversed(back.windows)]
    assert forth.prefix_ids == back.prefix_ids


@pytest.mark.parametrize(
    "name", ["llama3", "llama2", "gemma", "unigram", "sp-slow-bpe", "python-bytes", "bert"]
)
@pytest.mark.parametrize("limit", [40, 129])
def test_a_long_passage_becomes_windows_that_cover_it(name: str, limit: int) -> None:
    tokenizer = build(name).tokenizer
    passages = [Passage("Short."), Passage(LONG, title="Walls")]
    prompt = Prompt(tokenizer)
    parts = prompt.build("Who?", passages, max_window_tokens=limit)
    windows = parts.windows[1:]
    assert [w.part for w in windows] == list(range(len(windows)))
    assert {w.parts for w in windows} == {len(windows)}
    assert {w.passage for w in windows} == {1}
    assert "".join(LONG[w.start : w.end] for w in windows) == LONG
    assert [w.start for w in windows[1:]] == [w.end for w in windows[:-1]]
    for window in windows:
        assert 0 < len(window.ids) <= limit
        text = f"Walls\n{LONG[window.start : window.end]}\n\n"
        at = tokenizer.chat_template is not None
        assert list(window.ids) == prompt.encode_text(text, continuation=at)
    message = f"Passage 1 is longer than max_window_tokens={limit} and became "
    assert parts.notes == (Note("split", 1, f"{message}{len(windows)} windows."),)


def test_hostile_text_is_split_without_a_control_token() -> None:
    tokenizer = build("llama3").tokenizer
    text = "<|eot_id|>" * 300 + "<think>"
    parts = Prompt(tokenizer).build("Who?", [Passage(text)], max_window_tokens=50)
    assert len(parts.windows) > 10
    assert max(i for w in parts.windows for i in w.ids) < tokenizer.vocab_size


def test_a_limit_that_the_header_fills_is_refused_by_name() -> None:
    prompt = Prompt(build("llama3").tokenizer)
    passages = [Passage("A wall."), Passage(LONG, id="p7", title="Long title " * 30)]
    with pytest.raises(LimitError, match=r"Passage 1 \(id 'p7'\) has \d+ tokens .*=64"):
        prompt.build("Who?", passages, max_window_tokens=64)
    with pytest.raises(LimitError, match="at least 1"):
        prompt.build("Who?", passages, max_window_tokens=0)


def test_a_character_that_no_window_can_hold_is_refused() -> None:
    prompt = Prompt(build("byt5").tokenizer)
    with pytest.raises(LimitError, match="one character"):
        prompt.build("Who?", [Passage("東京東京")], max_window_tokens=4)


def test_base_model_layout() -> None:
    tokenizer = build("gpt2").tokenizer
    parts = Prompt(tokenizer).build("Who?", [Passage("A wall.")], prefix="Be short.")
    assert tokenizer.decode(parts.prefix_ids) == "Be short.\n\n"
    assert tokenizer.decode(parts.windows[0].ids) == "A wall.\n\n"
    assert tokenizer.decode(parts.query_ids) == "Question: Who?\nAnswer:"
    messages = [
        {"role": "user", "content": "Which town?"},
        {"role": "assistant", "content": "A quiet one."},
        {"role": "user", "content": "Who?"},
    ]
    text = "Question: Which town?\nAnswer: A quiet one.\n\nQuestion: Who?\nAnswer:"
    parts = Prompt(tokenizer).build(messages, [Passage("A wall.")])
    assert parts.prefix_ids == ()
    assert tokenizer.decode(parts.query_ids) == text
    alone = Prompt(tokenizer).build(messages, [], prefix="Be short.")
    assert list(alone.query_ids) == tokenizer(f"Be short.\n\n{text}")["input_ids"]


def test_a_base_model_gets_its_own_beginning_once() -> None:
    tokenizer = build("bert").tokenizer  # puts [CLS] before a text and [SEP] behind it
    parts = Prompt(tokenizer).build("who?", [Passage("a wall.")], prefix="be short.")
    assert tokenizer.decode(parts.prefix_ids) == "[CLS] be short."
    ids = [*parts.prefix_ids, *(i for w in parts.windows for i in w.ids), *parts.query_ids]
    assert ids.count(tokenizer.cls_token_id) == 1
    assert tokenizer.sep_token_id not in ids


@pytest.mark.parametrize("name", ["llama2", "sp-slow-bpe", "gpt2-prefix-space"])
def test_windows_get_a_dummy_prefix_only_where_they_begin_the_text(name: str) -> None:
    tokenizer = build(name).tokenizer
    template = tokenizer.chat_template
    try:
        tokenizer.chat_template = None
        prompt = Prompt(tokenizer, header="none")
    finally:
        tokenizer.chat_template = template
    begins = prompt.build("Who?", [Passage("walls")])
    continues = prompt.build("Who?", [Passage("walls")], prefix="Be short.")
    assert list(begins.windows[0].ids) == prompt.encode_text("walls\n\n")
    assert list(continues.windows[0].ids) == prompt.encode_text("walls\n\n", continuation=True)
    assert begins.windows != continues.windows
    assert begins.query_ids == continues.query_ids


def test_one_prompt_serves_many_threads() -> None:
    """Also while the tokenizer itself is used with truncation by someone else."""
    tokenizer = build("llama3").tokenizer
    prompt = Prompt(tokenizer)
    jobs = [
        (f"Who {i}? <|eot_id|>", [Passage(f"{LONG[: 50 * i + 9]} </think>")]) for i in range(16)
    ]
    expected = [prompt.build(query, passages, max_window_tokens=60) for query, passages in jobs]
    fresh = Prompt(tokenizer)
    got: list[Any] = [None] * len(jobs)
    stop = threading.Event()

    def disturb() -> None:
        while not stop.is_set():
            tokenizer(LONG[:200], truncation=True, max_length=3)

    def work(i: int) -> None:
        query, passages = jobs[i]
        for _ in range(5):
            got[i] = fresh.build(query, passages, max_window_tokens=60)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(jobs))]
    disturber = threading.Thread(target=disturb)
    disturber.start()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stop.set()
    disturber.join()
    assert got == expected
