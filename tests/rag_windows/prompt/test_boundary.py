"""No text becomes a control token, whatever it holds; nothing of it is lost; and the ids are the
ordinary ones where those hold no control token.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from rag_windows import Passage, PromptError
from rag_windows.integration import Boundary, Piece
from rag_windows.interchange import Prompt
from tests.fixtures_tokenizers import ALPHABET, CHAT, LOSSLESS, NAMES, SENTENCES, build
from tests.rag_windows.cache.disk_cases import FULL

TEXTS = 10_000 if FULL else 2_000
AT_ONCE = 10  # drawing several texts for an example saves most of Hypothesis' own time
EXAMPLES = -(-TEXTS // (AT_ONCE * len(NAMES)))
HOSTILE: Any = {
    "derandomize": True,
    "deadline": None,
    "database": None,
    "suppress_health_check": [HealthCheck.too_slow],
}

BYTE_COMPLETE = {name for name in NAMES if name != "bert"}
BENIGN = "the harbour"


@functools.cache
def boundary_of(name: str) -> Boundary:
    return Boundary(build(name))


@functools.cache
def prompt_of(name: str) -> Prompt:
    return Prompt(build(name), header="number+title")


@functools.cache
def forbidden(name: str) -> set[int]:
    """The rule once more, written from the tokenizer's own attributes."""
    tokenizer = build(name)
    ids = {i for i in tokenizer.all_special_ids if i is not None}
    for id_, token in tokenizer.added_tokens_decoder.items():
        if token.special or token.content.replace("▁", " ").strip():
            ids.add(id_)
    return ids


@functools.cache
def bad(name: str) -> set[int]:
    """Vocabularies without bytes lack some characters and words."""
    return forbidden(name) - (set() if name in BYTE_COMPLETE else {build(name).unk_token_id})


def control_spellings(tokenizer: Any) -> list[str]:
    names = {t.content for t in tokenizer.added_tokens_decoder.values()}
    names |= set(map(str, tokenizer.all_special_tokens))
    return sorted(name for name in names if name.replace("▁", " ").strip())


@functools.cache
def hostile_texts(name: str) -> st.SearchStrategy[str]:
    """Words, any characters, and control tokens: whole, cut, nested, in other spellings."""
    spelled = st.sampled_from(control_spellings(build(name)))
    places = st.integers(0, 30)
    cut = st.builds(lambda s, n: s[: n % (len(s) + 1)], spelled, places)
    rest = st.builds(lambda s, n: s[n % (len(s) + 1) :], spelled, places)
    nested = st.builds(
        lambda s, inner, n: s[: n % len(s)] + inner + s[n % len(s) :], *[spelled] * 2, places
    )
    wide = spelled.map(lambda s: "".join(chr(ord(c) + 0xFEE0) if "!" <= c <= "~" else c for c in s))
    other = st.sampled_from(["<0x0A>", "<unk>", "[UNK]", "▁", " ", "\n\n", "\t", "    ", "\r\n"])
    words = st.sampled_from(SENTENCES)
    free = st.text(max_size=8) if name in BYTE_COMPLETE else st.text(ALPHABET, max_size=8)
    parts = [words, free, spelled, cut, rest, nested, other, spelled.map(str.upper)]
    if name in BYTE_COMPLETE:
        parts.append(wide)
    return st.lists(st.one_of(parts), min_size=1, max_size=5).map("".join)


def shown(name: str, ids: Any) -> str:
    """Decoded text, byte tokens joined to characters; ▁, as SentencePiece writes spaces, is one."""
    shown = build(name).decode(ids, clean_up_tokenization_spaces=False)
    return str(shown).replace("▁", " ")


def squeezed(text: str) -> str:
    return "".join(text.replace("▁", " ").split())


def check(name: str, text: str) -> None:
    """No control token in the ids, the whole text in them, and the ordinary ids where possible."""
    tokenizer, boundary, lossless = build(name), boundary_of(name), name in LOSSLESS
    anchor = boundary.encode("x")
    for at in ("start", "text"):
        ids = boundary.encode(text, at)
        assert not bad(name).intersection(ids)
        if lossless and at == "text":
            assert shown(name, anchor + ids).lstrip(" ") == f"x{text}".replace("▁", " ")
        elif lossless:
            # A tokenizer with a dummy prefix takes the text's own first space for it.
            assert shown(name, ids).lstrip(" ") == text.replace("▁", " ").lstrip(" ")
        elif tokenizer.unk_token_id is None or tokenizer.unk_token_id not in ids:
            normalizer = tokenizer.backend_tokenizer.normalizer
            kept = text if normalizer is None else normalizer.normalize_str(text)
            made = shown(name, ids)
            made = made if normalizer is None else normalizer.normalize_str(made)
            assert squeezed(made) == squeezed(kept)
    ordinary = tokenizer(text, add_special_tokens=False)["input_ids"]
    if not forbidden(name).intersection(ordinary) and "<0x" not in text:
        assert boundary.encode(text) == ordinary


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=EXAMPLES, **HOSTILE)
@given(data=st.data())
def test_hostile_texts(name: str, data: st.DataObject) -> None:
    texts = data.draw(st.lists(hostile_texts(name), min_size=AT_ONCE, max_size=AT_ONCE))
    for text in texts:
        check(name, text)
    boundary = boundary_of(name)
    *read, benign, unreadable = boundary.encode_plain([*texts, BENIGN, "\ud800"], "text")
    for ids, text in zip(read, texts, strict=True):
        assert ids is None or ids == boundary.encode(text, "text")
    assert benign == boundary.encode(BENIGN, "text"), "nothing in it needs a second look"
    assert unreadable is None


@pytest.mark.parametrize("name", NAMES)
def test_every_control_token_whole_nested_doubled_and_cut(name: str) -> None:
    for content in control_spellings(build(name)):
        half = len(content) // 2
        for text in (
            *(content, f" {content} ", f"the{content}sea", content * 3),
            f"{content[:half]}{content}{content[half:]}",
            *(f"{content[:1]}{content}", f"{content}{content[-1]}"),
            *(content.upper(), content.title()),
        ):
            check(name, text)


def controls(name: str, ids: Any) -> list[int]:
    return [i for i in ids if i in bad(name)]


def check_prompt(name: str, text: str, other: str) -> None:
    """Text in every place of a prompt leaves the control tokens that harmless words leave."""
    hostile, harmless = (
        prompt_of(name).build(
            [
                {"role": "user", "content": a},
                {"role": "assistant", "content": f"{b}."},
                {"role": "user", "content": f"{b}{a}"},
            ],
            [Passage(a + BENIGN, title=b), Passage(b + BENIGN, title=a), Passage(b + a)],
            prefix=f"{a}{b}",
        )
        for a, b in ((text, other), (BENIGN, BENIGN))
    )
    assert not any(bad(name).intersection(window.ids) for window in hostile.windows)
    assert controls(name, hostile.prefix_ids) == controls(name, harmless.prefix_ids)
    assert controls(name, hostile.query_ids) == controls(name, harmless.query_ids)


@pytest.mark.parametrize("name", NAMES)
def test_every_control_token_cut_at_every_border_of_a_prompt(name: str) -> None:
    for content in control_spellings(build(name))[:8]:
        for cut in sorted({1, len(content) // 2, len(content) - 1, len(content)} - {0}):
            check_prompt(name, content[:cut], content[cut:] or BENIGN)
            check_prompt(name, content[cut:] or BENIGN, content[:cut])


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=12, **HOSTILE)
@given(data=st.data())
def test_hostile_texts_in_every_place_of_a_prompt(name: str, data: st.DataObject) -> None:
    text, other = (data.draw(hostile_texts(name)) for _ in range(2))
    check_prompt(name, text if text.strip() else BENIGN, other if other.strip() else BENIGN)


@pytest.mark.parametrize("name", CHAT)
def test_a_message_cannot_finish_a_token_that_the_template_began(name: str) -> None:
    """The template's last characters before a message and its first ones after it are text here."""
    tokenizer = build(name)
    for content in control_spellings(tokenizer)[:4]:
        for cut in {1, 2, len(content) // 2, len(content) - 1}:
            template = content[:cut] + "{{ messages[-1].content }}" + content[cut:]
            prompt = Prompt(tokenizer, template_kwargs={"chat_template": template})
            expected = controls(name, prompt.build(BENIGN, []).query_ids)
            for text in (content[cut:], content[:cut], content[cut:] + content[:cut], content):
                assert controls(name, prompt.build(text, []).query_ids) == expected
                parts = prompt.build(text, [Passage(content[cut:]), Passage(content[:cut])])
                assert controls(name, parts.prefix_ids + parts.query_ids) == expected
                assert not any(bad(name).intersection(w.ids) for w in parts.windows)


def added(*tokens: str | AddedToken, **special: str) -> PreTrainedTokenizerFast:
    """A byte tokenizer with further tokens."""
    backend = build("gpt2").backend_tokenizer
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **special)
    tokenizer.add_tokens(list(tokens))
    return tokenizer


def test_runs_of_spaces_in_the_added_tokens_are_ordinary_text() -> None:
    tokenizer = build("gpt-neox")
    text = "the        sea wall <|sep|>   end"
    ids = boundary_of("gpt-neox").encode(text)
    assert tokenizer.convert_tokens_to_ids(" " * 8) in ids
    assert tokenizer.convert_tokens_to_ids("<|sep|>") not in ids
    assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("name", ["llama2", "gemma", "unigram"])
def test_the_name_of_a_byte_is_not_the_byte(name: str) -> None:
    for text in ("<0x0A>", "x <0x41>y\n<0x0A", "<0x<0x0A>0A>"):
        assert shown(name, boundary_of(name).encode(text)) == text


@pytest.mark.parametrize("name", ["unigram", "unigram-nfkc", "bert"])
def test_the_unknown_token_comes_from_unknown_characters_only(name: str) -> None:
    tokenizer, boundary = build(name), boundary_of(name)
    unknown = tokenizer.unk_token
    known = boundary.encode(f"the {unknown[0]} sea {unknown[-1]}")
    assert tokenizer.unk_token_id not in known
    assert tokenizer.unk_token_id not in boundary.encode(f"the {unknown} sea")
    if name == "unigram-nfkc":  # lower-cased before it is looked up
        assert tokenizer.unk_token_id not in boundary.encode("the <UNK> sea")
    if name == "bert":
        assert tokenizer.unk_token_id in boundary.encode("the ☃☃☃ sea")


def test_ordinary_text_that_is_a_control_token_is_named_and_can_be_allowed() -> None:
    tokenizer = added(AddedToken("harbourside", single_word=True), pad_token="!")
    with pytest.raises(PromptError, match=r"control token '!'.*text_tokens=\['!'\]"):
        Boundary(tokenizer).encode("Stop!")
    allowed = Boundary(tokenizer, text_tokens=["!", "harbourside"])
    text = "the harbourside and harboursides!"
    assert allowed.encode(text) == tokenizer(text)["input_ids"]
    kept_out = Prompt(tokenizer).encode_text(text[:-1])
    assert tokenizer.convert_tokens_to_ids("harbourside") not in kept_out
    assert tokenizer.decode(kept_out) == text[:-1]
    with pytest.raises(PromptError, match="not special or added tokens"):
        Boundary(tokenizer, text_tokens=["?"])


def test_an_unknown_token_with_another_meaning_is_a_control_token() -> None:
    # Of "qwen3", it is padding and the end of documents too.
    assert "<|endoftext|>" in boundary_of("qwen3").controls
    backend = Tokenizer(models.WordLevel({"the": 0, "</s>": 1}, unk_token="</s>"))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="</s>", eos_token="</s>"
    )
    with pytest.raises(PromptError, match="control token '</s>'"):
        Boundary(tokenizer).encode("sea")
    assert Boundary(tokenizer).encode("the") == [0]


def test_what_no_tokenizer_can_read_is_refused() -> None:
    with pytest.raises(PromptError, match="Character 3 of the text"):
        boundary_of("llama3").encode("abc\ud800")
    with pytest.raises(PromptError, match="Character 1 of the text"):
        boundary_of("llama3").encode_pieces([Piece("a", trusted=True), Piece("\udfff")])
    with pytest.raises(PromptError, match=r"ByT5Tokenizer does not say.* Load a fast tokenizer"):
        Boundary(ByT5Tokenizer())


def test_templates_tokens_stand_and_texts_do_not() -> None:
    tokenizer, boundary = build("llama3"), boundary_of("llama3")
    end = tokenizer.eos_token_id
    pieces = [Piece("<|eot_id|>a ", trusted=True), Piece("b<|eot_id|>"), Piece("c<|eot_id|>", True)]
    ids = boundary.encode_pieces(pieces)
    assert [place for place, id_ in enumerate(ids) if id_ == end] == [0, len(ids) - 1]
    assert tokenizer.decode(ids) == "<|eot_id|>a b<|eot_id|>c<|eot_id|>"
    assert end not in boundary.encode_pieces([Piece("x<|eot", trusted=True), Piece("_id|>")])
    assert boundary.encode_pieces([]) == boundary.encode("") == []


def test_text_cannot_shift_a_control_token_by_overlapping_it() -> None:
    tokenizer = added("<<")
    boundary = Boundary(tokenizer)
    ids = boundary.encode_pieces([Piece("a<"), Piece("<<b", trusted=True)])
    control = tokenizer.convert_tokens_to_ids("<<")
    assert ids == [*boundary.encode("a<"), control, *boundary.encode("b")]


def test_a_templates_token_eats_white_space_beside_hostile_text_too() -> None:
    tokenizer = build("lower-bytes")  # <Strip> eats white space on both sides
    boundary = boundary_of("lower-bytes")
    ids = boundary.encode_pieces([Piece("a  <Strip> \n b", trusted=True), Piece(" <|E|>")])
    control = tokenizer.convert_tokens_to_ids("<Strip>")
    assert ids == [*boundary.encode("a"), control, *boundary.encode("b <|E|>")]


@pytest.mark.parametrize(("name", "at"), [("llama2", "text"), ("llama2-legacy", "start")])
def test_the_dummy_prefix_behind_a_control_token_is_the_tokenizers_own(name: str, at: Any) -> None:
    boundary = boundary_of(name)
    ids = boundary.encode_pieces([Piece("<s>the ", trusted=True), Piece("</s>")])
    assert ids == [build(name).bos_token_id, *boundary.encode("the </s>", at)]
    assert boundary.encode("the </s>", "text") != boundary.encode("the </s>", "start")
