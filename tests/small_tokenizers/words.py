"""Words and pieces of words."""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import BertTokenizer, PreTrainedTokenizerFast

from tests.small_tokenizers.byte_pairs import byte_level
from tests.small_tokenizers.corpus import ALPHABET, SENTENCES
from tests.small_tokenizers.registry import fixture
from tests.small_tokenizers.templates import CHATML, READER


@fixture("bert", lossless=False)
def _bert() -> Any:
    """WordPiece, lower case, accents stripped."""
    backend = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    backend.train_from_iterator(
        SENTENCES,
        trainers.WordPieceTrainer(
            vocab_size=500,
            special_tokens=names,
            show_progress=False,
            initial_alphabet=list(set("".join(ALPHABET).lower())),
        ),
    )
    tokenizer = BertTokenizer(vocab=backend.get_vocab())
    tokenizer.add_tokens([AddedToken("covid", single_word=True), "[unused1]"])
    return tokenizer


@fixture("words", lossless=False)
def _words() -> Any:
    """Whole words and single signs; control tokens in the vocabulary, other features mixed in."""
    names = ["<unk>", "<|begin|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"]
    backend = Tokenizer(models.WordLevel(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.train_from_iterator(
        [*SENTENCES, " ".join(ALPHABET)],
        trainers.WordLevelTrainer(vocab_size=800, special_tokens=names, show_progress=False),
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", bos_token="<|begin|>", eos_token="<|end|>"
    )
    tokenizer.add_special_tokens({"extra_special_tokens": names[3:]})
    tokenizer.add_tokens(
        [
            AddedToken("<Left>", lstrip=True, normalized=True),
            AddedToken("word-token", single_word=True, rstrip=True),
        ]
    )
    tokenizer.chat_template = READER
    return tokenizer


@fixture("lower-bytes", lossless=False)
def _lower() -> Any:
    """Added tokens matched after lower-casing, one eating white space, one only as a word."""
    backend = byte_level()
    backend.normalizer = normalizers.Lowercase()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<|S|>", eos_token="<|E|>"
    )
    tokenizer.add_tokens(
        [
            AddedToken("<Think>", normalized=True),
            AddedToken("<Strip>", normalized=True, lstrip=True, rstrip=True),
            AddedToken("Solo", normalized=True, single_word=True),
        ]
    )
    tokenizer.chat_template = CHATML.replace("<|im_start|>", "<|S|>").replace("<|im_end|>", "<|E|>")
    return tokenizer
