"""Single cases at the border between text and control tokens."""

from __future__ import annotations

import unicodedata
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, models
from transformers import PreTrainedTokenizerFast

from rag_windows import PromptError
from rag_windows.prompt.builder import Prompt
from rag_windows.prompt.tokenizing import Boundary, Piece
from tests.fixtures_tokenizers import build
from tests.small_tokenizers.in_python import Words


def test_runs_of_spaces_in_the_added_tokens_are_ordinary_text() -> None:
    tokenizer = build("gpt-neox").tokenizer
    boundary = Boundary(tokenizer)
    text = "the        sea\t\twall <|sep|>   end"
    ids = boundary.encode(text)
    assert tokenizer.convert_tokens_to_ids(" " * 8) in ids
    assert tokenizer.convert_tokens_to_ids("\t\t") in ids
    assert tokenizer.convert_tokens_to_ids("<|sep|>") not in ids
    assert tokenizer.decode(ids) == text


def test_added_spaces_keep_their_ids_behind_control_tokens() -> None:
    words = {"a": 0, "b": 1, " ": 2, "<": 3, "|": 4, "x": 9}
    backend = Tokenizer(models.BPE(vocab=words, merges=[]))
    backend.add_tokens(["<|x|>", "  ", "   "])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    boundary = Boundary(tokenizer)
    text = "a  b   x"
    assert boundary.encode(text) == tokenizer(text)["input_ids"]
    ids = boundary.encode("a<|x|>  b")
    assert tokenizer.convert_tokens_to_ids("<|x|>") not in ids
    assert tokenizer.decode(ids).replace(" ", "") == "a<|x|b"  # this vocabulary has no ">"


@pytest.mark.parametrize("name", ["llama2", "gemma", "unigram", "sp-slow-bpe", "sp-slow-unigram"])
def test_the_name_of_a_byte_is_not_the_byte(name: str) -> None:
    tokenizer = build(name).tokenizer
    boundary = Boundary(tokenizer)
    for text in ("<0x0A>", "x <0x41>y\n<0x0A", "<0x<0x0A>0A>"):
        ids = boundary.encode(text)
        assert _decoded(tokenizer, ids) == text


def _decoded(tokenizer: Any, ids: list[int]) -> str:
    model = getattr(tokenizer, "sp_model", None)
    return str(model.decode(ids) if model is not None else tokenizer.decode(ids))


@pytest.mark.parametrize("name", ["unigram", "unigram-nfkc", "bert", "words", "python-words"])
def test_the_unknown_token_comes_from_unknown_characters_only(name: str) -> None:
    tokenizer = build(name).tokenizer
    boundary = Boundary(tokenizer)
    unknown = tokenizer.unk_token
    known = boundary.encode(f"the {unknown[0]} sea {unknown[-1]}")
    assert tokenizer.unk_token_id not in known
    ids = boundary.encode(f"the {unknown} sea")
    if name in ("words", "python-words"):  # whole words: the pieces of the name are unknown too
        assert len(ids) >= 4
    else:
        assert tokenizer.unk_token_id not in ids
    if name == "unigram-nfkc":  # lower-cased before it is looked up
        assert tokenizer.unk_token_id in tokenizer("the <UNK> sea")["input_ids"]
        assert tokenizer.unk_token_id not in boundary.encode("the <UNK> sea")
    if name in ("bert", "words"):
        assert tokenizer.unk_token_id in boundary.encode("the ☃☃☃ sea")


def test_spellings_that_the_normalizer_turns_into_control_tokens() -> None:
    tokenizer = build("unigram-nfkc").tokenizer
    assert tokenizer.convert_tokens_to_ids("<|end|>") in tokenizer("＜｜ＥＮＤ｜＞")["input_ids"]
    boundary = Boundary(tokenizer)
    ids = boundary.encode("a ＜｜ＥＮＤ｜＞ b <|END|>")
    assert tokenizer.decode(ids) == "a <|end|> b <|end|>"
    assert not boundary.controls.ids.intersection(ids)


def test_a_padding_token_that_is_ordinary_text_is_named_and_can_be_allowed() -> None:
    backend = build("gpt2").tokenizer.backend_tokenizer
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="!")
    with pytest.raises(PromptError, match=r"control token '!'.*text_tokens=\['!'\]"):
        Boundary(tokenizer).encode("Stop!")
    allowed = Boundary(tokenizer, text_tokens=["!"])
    assert allowed.encode("Stop!") == tokenizer("Stop!")["input_ids"]
    with pytest.raises(PromptError, match="no special or added tokens"):
        Boundary(tokenizer, text_tokens=["?"])


def test_words_that_somebody_added_are_control_tokens_until_allowed() -> None:
    backend = build("gpt2").tokenizer.backend_tokenizer
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    tokenizer.add_tokens([AddedToken("harbourside", single_word=True)])
    id_ = tokenizer.convert_tokens_to_ids("harbourside")
    text = "the harbourside and harboursides"
    kept_out = Prompt(tokenizer).encode_text(text)
    assert id_ not in kept_out
    assert tokenizer.decode(kept_out) == text
    allowed = Prompt(tokenizer, text_tokens=["harbourside"]).encode_text(text)
    assert allowed == tokenizer(text)["input_ids"]
    assert allowed.count(id_) == 1


def test_python_tokenizers_keep_added_spaces_beside_hostile_text() -> None:
    tokenizer = build("python-bytes").tokenizer
    ids = Boundary(tokenizer).encode("the    sea <think>")
    assert tokenizer.convert_tokens_to_ids("    ") in ids
    assert tokenizer.convert_tokens_to_ids("<think>") not in ids
    assert tokenizer.decode(ids) == "the    sea <think>"


class WideWords(Words):
    """Folds wide characters before it looks words up, unseen from outside."""

    def _tokenize(self, text: str, **kwargs: Any) -> list[str]:
        return super()._tokenize(unicodedata.normalize("NFKC", text))


def test_a_spelling_that_only_the_tokenizer_knows_is_taken_apart() -> None:
    tokenizer = WideWords(unk_token="<unk>", bos_token="<s>", eos_token="</s>")
    tokenizer.add_tokens(["<sep>"])
    control = tokenizer.convert_tokens_to_ids("<sep>")
    assert control in tokenizer("the ＜sep＞ sea")["input_ids"]
    ids = Boundary(tokenizer).encode("the ＜sep＞ sea")
    assert control not in ids
    assert tokenizer.decode(ids) == "the <unk> <unk> sea"


def test_an_unknown_token_that_no_character_gives_is_a_control_token() -> None:
    boundary = Boundary(build("qwen3").tokenizer)  # unknown, padding and end of document in one
    assert "<|endoftext|>" in boundary.controls.by_content


def test_an_unknown_token_that_ends_texts_may_not_stand_for_unknown_words() -> None:
    backend = Tokenizer(models.WordLevel({"the": 0, "</s>": 1}, unk_token="</s>"))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="</s>", eos_token="</s>"
    )
    with pytest.raises(PromptError, match="control token '</s>'"):
        Boundary(tokenizer).encode("sea")
    assert Boundary(tokenizer).encode("the") == [0]


def test_half_a_surrogate_pair_is_refused_with_its_place() -> None:
    boundary = Boundary(build("llama3").tokenizer)
    with pytest.raises(PromptError, match="Character 3 of the text"):
        boundary.encode("abc\ud800")
    with pytest.raises(PromptError, match="Character 1 of the text"):
        boundary.encode_pieces([Piece("a", trusted=True), Piece("\udfff")])


def test_a_foreign_tokenizer_is_refused_by_name() -> None:
    with pytest.raises(PromptError, match="dict is no tokenizer"):
        Boundary({})


def test_templates_tokens_stand_and_texts_do_not() -> None:
    tokenizer = build("llama3").tokenizer
    end = tokenizer.eos_token_id
    boundary = Boundary(tokenizer)
    pieces = [Piece("<|eot_id|>a ", trusted=True), Piece("b<|eot_id|>"), Piece("c<|eot_id|>", True)]
    ids = boundary.encode_pieces(pieces)
    assert ids.count(end) == 2
    assert ids[0] == end
    assert ids[-1] == end
    assert tokenizer.decode(ids) == "<|eot_id|>a b<|eot_id|>c<|eot_id|>"
    joined = [Piece("x<|eot", trusted=True), Piece("_id|>")]
    assert end not in boundary.encode_pieces(joined)
    assert boundary.encode_pieces([]) == []
    assert boundary.encode("") == []


def test_text_cannot_shift_a_control_token_by_overlapping_it() -> None:
    backend = build("gpt2").tokenizer.backend_tokenizer
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    tokenizer.add_special_tokens({"extra_special_tokens": ["<<"]})
    boundary = Boundary(tokenizer)
    ids = boundary.encode_pieces([Piece("a<"), Piece("<<b", trusted=True)])
    control = tokenizer.convert_tokens_to_ids("<<")
    assert ids == [*boundary.encode("a<"), control, *boundary.encode("b")]


def test_a_templates_token_eats_white_space_beside_hostile_text_too() -> None:
    tokenizer = build("lower-bytes").tokenizer  # <Strip> eats white space on both sides
    boundary = Boundary(tokenizer)
    ids = boundary.encode_pieces([Piece("a  <Strip> \n b", trusted=True), Piece(" <|E|>")])
    control = tokenizer.convert_tokens_to_ids("<Strip>")
    assert ids == [*boundary.encode("a"), control, *boundary.encode("b <|E|>")]


def test_the_dummy_prefix_behind_a_control_token_is_the_tokenizers_own() -> None:
    for name, first_only in (("llama2", True), ("llama2-legacy", False)):
        tokenizer = build(name).tokenizer
        boundary = Boundary(tokenizer)
        ids = boundary.encode_pieces([Piece("<s>the ", trusted=True), Piece("</s>")])
        rest = boundary.encode("the </s>", "text" if first_only else "start")
        assert ids == [tokenizer.bos_token_id, *rest]
        assert boundary.encode("the </s>", "text") != boundary.encode("the </s>", "start")


def test_text_merges_with_the_templates_text_as_in_one_string() -> None:
    tokenizer = build("llama2").tokenizer
    boundary = Boundary(tokenizer)
    pieces = [Piece("<s>[INST] ", trusted=True), Piece("the harbour"), Piece(" [/INST]", True)]
    whole = tokenizer("<s>[INST] the harbour [/INST]", add_special_tokens=False)["input_ids"]
    assert boundary.encode_pieces(pieces) == whole
