"""Windows, headers, notes and limits; exact prompts of chat models, and what is refused."""

from __future__ import annotations

import random
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from rag_windows import LimitError, Passage, PromptError
from rag_windows.interchange import Prompt
from rag_windows.prompt.builder import split
from tests.fixtures_tokenizers import CHAT, LOSSLESS, build
from tests.rag_windows import small

LONG = "\n\n".join(
    f"Paragraph {i} of the long text. It says little. And it ends here, as promised! Does it?"
    for i in range(40)
)


@pytest.mark.parametrize(
    ("header", "titled", "untitled"),
    [
        ("none", "A wall.\n\n", "A ship.\n\n"),
        ("title", "Walls\nA wall.\n\n", "A ship.\n\n"),
        ("number", "[1]\nA wall.\n\n", "[2]\nA ship.\n\n"),
        ("number+title", "[1] Walls\nA wall.\n\n", "[2]\nA ship.\n\n"),
        (lambda p, n: f"{p.id}/{n}", "a/1\nA wall.\n\n", "b/2\nA ship.\n\n"),
        (lambda p, n: None, "A wall.\n\n", "A ship.\n\n"),
    ],
)
def test_header(header: Any, titled: str, untitled: str) -> None:
    tokenizer = build("llama3")
    passages = [Passage("A wall.", id="a", title="Walls"), Passage("A ship.", id="b")]
    parts = Prompt(tokenizer, header=header).build("Who?", passages)
    assert [tokenizer.decode(window.ids) for window in parts.windows] == [titled, untitled]
    with pytest.raises(PromptError, match=r"number\+title"):
        Prompt(tokenizer, header="titles")


def test_blank_and_repeated_passages_make_no_window_and_are_noted() -> None:
    passages = [
        Passage("A wall.", title="Walls"),
        Passage(" \n\t", id="empty", title="Title only"),
        Passage("A wall.", title="Walls", id="again"),
        Passage("A wall."),
        Passage(""),
    ]
    prompt = Prompt(build("llama3"), header="number")
    parts = prompt.build("Who?", passages)
    assert [window.passage for window in parts.windows] == [0, 3]
    assert [(note.kind, note.passage, note.of) for note in parts.notes] == [
        ("blank", 1, None),
        ("duplicate", 2, 0),
        ("blank", 4, None),
    ]
    assert "'empty'" in parts.notes[0].message
    assert "repeats passage 0" in parts.notes[1].message
    blank = prompt.build("Who?", [Passage(" "), Passage("\n")])
    assert (blank.prefix_ids, len(blank.notes)) == ((), 2)
    assert blank.query_ids == prompt.build("Who?", []).query_ids


@pytest.mark.parametrize("name", ["llama3", "llama2", "gemma", "unigram", "bert"])
@pytest.mark.parametrize("limit", [40, 129])
def test_a_long_passage_becomes_windows_that_cover_it(name: str, limit: int) -> None:
    tokenizer = build(name)
    passages = [Passage("Short."), Passage(LONG, title="Walls")]
    prompt = Prompt(tokenizer)
    parts = prompt.build("Who?", passages, max_window_tokens=limit)
    windows = parts.windows[1:]
    assert [(w.part, w.parts, w.passage) for w in windows] == [
        (number, len(windows), 1) for number in range(len(windows))
    ]
    assert "".join(LONG[w.start : w.end] for w in windows) == LONG
    for window in windows:
        assert 0 < len(window.ids) <= limit
        text = f"Walls\n{LONG[window.start : window.end]}\n\n"
        inside = tokenizer.chat_template is not None
        assert list(window.ids) == prompt.encode_text(text, continuation=inside)
    (note,) = parts.notes
    assert (note.kind, note.passage) == ("split", 1)
    assert f"max_window_tokens={limit} and was split into {len(windows)} windows." in note.message


def cut(text: str, limit: int) -> list[str]:
    """Parts of a text with a token a byte and two for the blank line."""
    prompt = Prompt(small.tokenizer())
    windows = prompt.build("Who?", [Passage(text)], max_window_tokens=limit).windows
    assert all(len(window.ids) <= limit for window in windows)
    return [text[window.start : window.end] for window in windows]


def test_paragraphs_before_sentences_before_spaces_before_characters() -> None:
    assert cut("one two. three\n\n" * 4, 20) == ["one two. three\n\n"] * 4
    assert cut("One two three. " * 4, 20) == ["One two three. "] * 4
    assert cut("abcde fghij " * 4, 16) == ["abcde fghij "] * 4
    assert cut("x" * 20, 10) == ["x" * 8, "x" * 8, "x" * 4]
    assert cut("東京は。" * 4, 27) == ["東京は。東京は。"] * 2
    assert all(len(part) >= 9 for part in cut("a.\n\n" + "word " * 40, 22)[:-1])


@pytest.mark.parametrize("seed", range(10))
def test_parts_cover_any_text_and_fit(seed: int) -> None:
    draw = random.Random(seed)
    text = "a" + "".join(draw.choice("ab .!\n\n東é") for _ in range(draw.randint(30, 900)))
    assert "".join(cut(text, draw.randint(9, 60))) == text


def test_work_grows_with_the_text_and_not_with_its_square() -> None:
    read = []

    def encode(text: str) -> list[int]:
        read.append(len(text))
        return list(text.encode())

    text = "Some words stand here. " * 7_000
    split(text, encode, 512, len(text))
    assert sum(read) < 5 * len(text)


def test_limits_that_nothing_fits_into_are_refused_by_name() -> None:
    prompt = Prompt(build("llama3"))
    passages = [Passage(" "), Passage(LONG, id="p7", title="Walls")]
    with pytest.raises(LimitError, match=r"Passage 1 \(id 'p7'\) has \d+ tokens .*=1:"):
        prompt.build("Who?", passages, max_window_tokens=1)
    with pytest.raises(LimitError, match="one character"):
        Prompt(small.tokenizer()).build("Who?", [Passage("東京")], max_window_tokens=4)


@pytest.mark.parametrize("title", ["Long title " * 99, "word " * 3300, "x" * 2000, "東京" * 900])
@pytest.mark.parametrize("limit", [32, 64, 200])
def test_a_title_that_fills_a_window_is_cut_and_noted(title: str, limit: int) -> None:
    tokenizer = build("llama3")
    prompt = Prompt(tokenizer)
    passages = [Passage("A wall."), Passage(LONG, id="p7", title=title)]
    parts = prompt.build("Who?", passages, max_window_tokens=limit)
    assert max(len(window.ids) for window in parts.windows) <= limit
    windows = [window for window in parts.windows if window.passage == 1]
    assert "".join(LONG[window.start : window.end] for window in windows) == LONG
    headers, splits = parts.notes
    assert (headers.kind, headers.passage, splits.kind) == ("header", 1, "split")
    assert re.search(
        rf"The header of passage 1 \(id 'p7'\) has \d+ tokens, .*={limit}, and was cut to half",
        headers.message,
    )
    texts = [tokenizer.decode(window.ids) for window in windows]
    assert all("…\n" in text for text in texts)
    short = Passage(LONG, title="A title")
    assert [one.kind for one in prompt.build("Who?", [short], max_window_tokens=64).notes] == [
        "split"
    ]


def test_a_base_model_gets_its_own_beginning_once() -> None:
    tokenizer = build("bert")  # puts [CLS] before a text and [SEP] behind it
    parts = Prompt(tokenizer).build("who?", [Passage("a wall.")], prefix="be short.")
    assert tokenizer.decode(parts.prefix_ids) == "[CLS] be short."
    ids = [*parts.prefix_ids, *(i for w in parts.windows for i in w.ids), *parts.query_ids]
    assert ids.count(tokenizer.cls_token_id) == 1
    assert tokenizer.sep_token_id not in ids


@pytest.mark.parametrize("name", ["llama2", "gpt2-prefix-space"])
def test_windows_get_a_dummy_prefix_only_where_they_begin_the_text(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build(name), "chat_template", None)
    prompt = Prompt(build(name), header="none")
    begins = prompt.build("Who?", [Passage("walls")])
    continues = prompt.build("Who?", [Passage("walls")], prefix="Be short.")
    assert list(begins.windows[0].ids) == prompt.encode_text("walls\n\n")
    assert list(continues.windows[0].ids) == prompt.encode_text("walls\n\n", continuation=True)
    assert begins.windows != continues.windows
    assert begins.query_ids == continues.query_ids


def test_one_prompt_serves_many_threads() -> None:
    """Also while the tokenizer itself is used with truncation by someone else."""
    tokenizer = build("llama3")
    texts = [f"{LONG[: 50 * i + 9]} </think>" for i in range(16)]
    prompt, fresh, over = Prompt(tokenizer), Prompt(tokenizer), threading.Event()

    def ask(prompt: Prompt, text: str) -> Any:
        return prompt.build(f"{text[:9]}? <|eot_id|>", [Passage(text)], max_window_tokens=60)

    def disturb() -> None:
        while not over.is_set():
            tokenizer(LONG[:200], truncation=True, max_length=3)

    expected = [ask(prompt, text) for text in texts]
    with ThreadPoolExecutor(17) as pool:
        pool.submit(disturb)
        asked = [pool.submit(ask, fresh, text) for text in texts]
        got = [one.result() for one in asked]
        over.set()
    assert got == expected


def conversations(question: str, *, system: bool) -> list[list[dict[str, str]]]:
    user = {"role": "user", "content": question}
    earlier = [
        {"role": "user", "content": "Which town?"},
        {"role": "assistant", "content": " A quiet one. "},
    ]
    told = {"role": "system", "content": "Answer from the passages."}
    return [[user], [*earlier, user], *([[told, user], [told, *earlier, user]] if system else [])]


@pytest.mark.parametrize(
    "question",
    [
        "  spaces   inside and around \n",
        "\n\nA line first, café 東京 (b)tag(/b) 1 < 2 & [x]",
        "ends with a sign <",
    ],
)
@pytest.mark.parametrize("name", CHAT)
def test_without_passages_ids_are_those_of_apply_chat_template(name: str, question: str) -> None:
    tokenizer = build(name)
    for messages in conversations(question, system=name != "gemma"):
        expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        parts = Prompt(tokenizer).build(messages, [])
        assert (parts.prefix_ids, parts.windows) == ((), ())
        assert list(parts.query_ids) == expected


def test_a_long_conversation_is_rendered_as_often_as_a_short_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokenizer = build("llama3")
    render, counts = tokenizer.apply_chat_template, list[int]()

    def counted(*given: Any, **options: Any) -> Any:
        counts[-1] += 1
        return render(*given, **options)

    monkeypatch.setattr(tokenizer, "apply_chat_template", counted)
    for turns in (2, 20, 200):
        counts.append(0)
        said = [("user", "assistant")[number % 2] for number in range(2 * turns + 1)]
        messages = [{"role": role, "content": f" {at} "} for at, role in enumerate(said)]
        Prompt(tokenizer).build(messages, [])
    assert 0 < min(counts) == max(counts) <= 4


@pytest.mark.parametrize("name", [n for n in CHAT if n in LOSSLESS])
def test_with_passages_the_text_is_the_template_with_passages_before_the_question(
    name: str,
) -> None:
    tokenizer = build(name)
    passages = [Passage("The wall is white.", title="Walls"), Passage("Ships came in spring.")]
    windows = "Walls\nThe wall is white.\n\nShips came in spring.\n\n"

    def decoded(ids: Any) -> str:
        text = str(tokenizer.decode(ids, clean_up_tokenization_spaces=False))
        # This one puts a space behind each control token, a window has none.
        text = text.replace(" ", "") if name == "gpt2-prefix-space" else text
        return text.replace("<0x0A>", "\n")

    for messages in conversations("Who sold the ships?", system=name != "gemma"):
        parts = Prompt(tokenizer).build(messages, passages)
        first = next(i for i, m in enumerate(messages) if m["role"] == "user")
        whole = [dict(message) for message in messages]
        whole[first]["content"] = windows + whole[first]["content"]
        expected = tokenizer.apply_chat_template(whole, add_generation_prompt=True)["input_ids"]
        ids = [*parts.prefix_ids, *(i for w in parts.windows for i in w.ids), *parts.query_ids]
        assert decoded(ids) == decoded(expected)
        if tokenizer.bos_token_id in expected:
            assert ids.count(tokenizer.bos_token_id) == expected.count(tokenizer.bos_token_id)


def test_a_refused_system_message_goes_before_the_passages_of_the_first_user_message() -> None:
    tokenizer = build("gemma")
    parts = Prompt(tokenizer).build("Who?", [Passage("A wall.")], prefix="Be short.")
    assert tokenizer.decode(parts.prefix_ids) == "<s><start_of_turn>user\nBe short.\n\n"
    assert tokenizer.decode(parts.query_ids) == "Who?<end_of_turn>\n<start_of_turn>model\n"


def test_template_variables_reach_the_template() -> None:
    tokenizer = build("qwen3")
    parts = Prompt(tokenizer, template_kwargs={"enable_thinking": False}).build("Who?", [])
    assert tokenizer.decode(parts.query_ids).endswith("assistant\n<think>\n\n</think>\n\n")
    assert tokenizer.convert_tokens_to_ids("</think>") in parts.query_ids
    assert "<think>" not in tokenizer.decode(Prompt(tokenizer).build("Who?", []).query_ids)
    with pytest.raises(PromptError, match="add_generation_prompt"):
        Prompt(tokenizer, template_kwargs={"add_generation_prompt": False})


def test_earlier_reasoning_is_left_out_as_the_template_does_it() -> None:
    tokenizer = build("qwen3")
    messages = [
        {"role": "user", "content": "Which town?"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nA quiet one."},
        {"role": "user", "content": "Who built it?"},
    ]
    expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert list(Prompt(tokenizer).build(messages, []).query_ids) == expected
    assert "hm" not in tokenizer.decode(expected)


def with_template(template: str) -> Prompt:
    return Prompt(build("qwen3"), template_kwargs={"chat_template": template})


EACH = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"


@pytest.mark.parametrize(
    ("template", "prefix", "query"),
    [
        (EACH.replace("m.content", "m.content | upper"), "<|im_start|>BE SHORT.", " WHO? "),
        (
            f"{EACH}again: {{{{ messages[0].content }}}}",
            "<|im_start|>Be short.",
            "again: Be short.",
        ),
        (
            EACH.replace(
                "{{ m.content }}", "{% if m.role != 'system' %}{{ m.content }}{% endif %}"
            ),
            "Be short.\n\n",
            " who? <|im_end|>",
        ),
    ],
    ids=["upper case", "twice", "no system message"],
)
def test_what_a_template_does_to_texts_is_followed(template: str, prefix: str, query: str) -> None:
    tokenizer = build("qwen3")
    parts = with_template(template).build(" who? ", [Passage("a wall")], prefix="Be short.")
    assert prefix in tokenizer.decode(parts.prefix_ids)
    assert query in tokenizer.decode(parts.query_ids)
    assert tokenizer.decode(parts.windows[0].ids) == "a wall\n\n"


@pytest.mark.parametrize(
    ("template", "match"),
    [
        ("{% for m in messages %}{{ m.content[:3] }}{% endfor %}", "leaves out|changes"),
        ("{% for m in messages %}{{ m.content | replace('?', '') }}{% endfor %}", "changes"),
        (
            "{% for m in messages %}{% if 'What' in m.content %}<|im_start|>{% endif %}"
            "{{ m.content }}{% endfor %}",
            "changes message 0",
        ),
        ("{% for m in messages %}{{ m.role }}{% endfor %}", "leaves out message 0"),
        ("{{ raise_exception('only on sundays') }}", "only on sundays"),
    ],
)
def test_a_template_that_cannot_be_followed_is_refused(template: str, match: str) -> None:
    for passages in ([Passage("What is a wall?")], []):
        with pytest.raises(PromptError, match=match):
            with_template(template).build("What is that?", passages)
    with pytest.raises(PromptError, match="2 times"):
        with_template(EACH + EACH).build("One?", [Passage("a wall")])
