"""Tokenizers that transformers runs in Python."""

from __future__ import annotations

from typing import Any, ClassVar

from tokenizers import AddedToken
from transformers import (
    BertGenerationTokenizer,
    ByT5Tokenizer,
    GPTSw3Tokenizer,
    PreTrainedTokenizer,
)

from tests.small_tokenizers.byte_pairs import byte_alphabet, byte_level
from tests.small_tokenizers.corpus import ALPHABET, SENTENCES
from tests.small_tokenizers.registry import fixture
from tests.small_tokenizers.sentence_pieces import folder_of, train
from tests.small_tokenizers.templates import CHATML


@fixture("byt5")
def _byt5() -> Any:
    """Bytes in Python."""
    return ByT5Tokenizer(extra_ids=12)


@fixture("sp-slow-bpe")
def _sp_slow_bpe() -> Any:
    """SentencePiece in Python, with its dummy prefix, and a user-defined marker."""
    names = ("<|im_start|>", "<|im_end|>")
    with folder_of(train("bpe", bytes_=True, names=names), "spiece.model") as folder:
        tokenizer = BertGenerationTokenizer(
            str(folder / "spiece.model"), extra_special_tokens=list(names)
        )
    tokenizer.add_tokens(["<think>"])
    tokenizer.chat_template = CHATML
    return tokenizer


@fixture("sp-slow-unigram")
def _sp_slow_unigram() -> Any:
    """SentencePiece in Python without a dummy prefix."""
    with folder_of(train("unigram", bytes_=True), "spiece.model") as folder:
        tokenizer = BertGenerationTokenizer(str(folder / "spiece.model"), legacy=False)
    tokenizer.add_special_tokens({"extra_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = CHATML
    return tokenizer


@fixture("gpt-sw3", lossless=False)
def _gpt_sw3() -> Any:
    """SentencePiece in Python with its own cleaning of the text."""
    with folder_of(train("bpe", bytes_=True), "spiece.model") as folder:
        return GPTSw3Tokenizer(str(folder / "spiece.model"))


class BytePairs(PreTrainedTokenizer):
    """A tokenizer in Python in the manner of tiktoken: bytes, then merges by rank."""

    model_input_names: ClassVar[list[str]] = ["input_ids", "attention_mask"]

    def __init__(self, **kwargs: Any) -> None:
        self._backend = byte_level(500)
        self._words = self._backend.get_vocab()
        self._names = {i: word for word, i in self._words.items()}
        super().__init__(special_tokens_pattern="none", **kwargs)

    @property
    def vocab_size(self) -> int:
        return len(self._words)

    def get_vocab(self) -> dict[str, int]:
        return {**self._words, **self.added_tokens_encoder}

    def _tokenize(self, text: str, **kwargs: Any) -> list[str]:
        return list(self._backend.encode(text).tokens)

    def _convert_token_to_id(self, token: str) -> int | None:
        return self._words.get(token)

    def _convert_id_to_token(self, index: int) -> str:
        return self._names[index]

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        alphabet = {chr(c): b for b, c in byte_alphabet().items()}
        data = b"".join(
            token.encode()
            if token in self.added_tokens_encoder
            else bytes(alphabet[c] for c in token)
            for token in tokens
        )
        return data.decode(errors="replace")


@fixture("python-bytes")
def _python_bytes() -> Any:
    """Merges in Python; runs of spaces added, a marker that is not special."""
    tokenizer = BytePairs(bos_token="<|begin|>", eos_token="<|endoftext|>")
    tokenizer.add_special_tokens({"extra_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.add_tokens([AddedToken("    "), "<think>"])
    tokenizer.chat_template = CHATML
    return tokenizer


class Words(PreTrainedTokenizer):
    """Lower-cased words and signs in Python; its vocabulary holds its control tokens."""

    model_input_names: ClassVar[list[str]] = ["input_ids", "attention_mask"]

    def __init__(self, **kwargs: Any) -> None:
        words = [w.lower() for s in SENTENCES for w in s.split()] + [c.lower() for c in ALPHABET]
        names = ["<unk>", "<s>", "</s>", "<sep>"]
        self._words = {word: i for i, word in enumerate(dict.fromkeys([*names, *words]))}
        self._names = {i: word for word, i in self._words.items()}
        super().__init__(special_tokens_pattern="bos", **kwargs)

    @property
    def vocab_size(self) -> int:
        return len(self._words)

    def get_vocab(self) -> dict[str, int]:
        return {**self._words, **self.added_tokens_encoder}

    def _tokenize(self, text: str, **kwargs: Any) -> list[str]:
        return text.lower().split()

    def _convert_token_to_id(self, token: str) -> int:
        return self._words.get(token, 0)

    def _convert_id_to_token(self, index: int) -> str:
        return self._names[index]


@fixture("python-words", lossless=False)
def _python_words() -> Any:
    """White-space words in Python: a control token's spelling is a word like others."""
    tokenizer = Words(unk_token="<unk>", bos_token="<s>", eos_token="</s>")
    tokenizer.add_tokens(["<sep>"])
    return tokenizer
