from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from training.tokens import CONTROL, save_tokenizer, space_twins, train_tokenizer, words

TOKENIZER = train_tokenizer()


@given(st.text())
def test_any_text_comes_back(text: str) -> None:
    encoding = TOKENIZER.backend_tokenizer.encode(text, add_special_tokens=False)
    if not any(token in text for token in CONTROL):
        assert TOKENIZER.decode(encoding.ids) == text


def test_every_word_is_one_token_with_and_without_a_space() -> None:
    for word in words():
        assert len(TOKENIZER.encode(word)) == 1
        assert len(TOKENIZER.encode(f" {word}")) == 1


def test_twins_differ_by_a_space() -> None:
    twins = space_twins(TOKENIZER)
    assert len(twins) > 1000
    for bare, spaced in twins[::50]:
        assert TOKENIZER.decode([spaced]) == " " + TOKENIZER.decode([bare])


def test_training_is_repeatable(tokenizer: PreTrainedTokenizerFast) -> None:
    again = train_tokenizer()
    assert again.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()


def test_saved_tokenizer_loads_with_its_template(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    save_tokenizer(tokenizer, tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "a"},
        {"role": "user", "content": "r"},
    ]
    text = loaded.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|begin|><|system|>s<|end|><|user|>q<|end|><|assistant|>a<|end|><|user|>r<|end|><|assistant|>"
    )
    assert loaded("Alra  Ashden .\n\n")["input_ids"] == tokenizer("Alra  Ashden .\n\n")["input_ids"]
    assert loaded.decode(loaded.encode("a , b .  c")) == "a , b .  c"
