"""SentencePiece models, and fast tokenizers converted from them."""

from __future__ import annotations

import functools
import io
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import sentencepiece
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import GemmaTokenizer, LlamaTokenizer, PreTrainedTokenizerFast, T5Tokenizer

from tests.small_tokenizers.corpus import SENTENCES
from tests.small_tokenizers.registry import build, fixture
from tests.small_tokenizers.templates import GEMMA, MISTRAL, PHI3, ROLES


@functools.cache
def train(kind: str, *, bytes_: bool, names: tuple[str, ...] = (), t5_ids: bool = False) -> bytes:
    """Serialized SentencePiece model; `names` are user-defined pieces."""
    ids = (2, -1, 1, 0) if t5_ids else (0, 1, 2, 3)
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(line for text in SENTENCES for line in text.split("\n") if line),
        model_writer=model,
        model_type=kind,
        vocab_size=720,
        byte_fallback=bytes_,
        user_defined_symbols=list(names),
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        character_coverage=1.0,
        hard_vocab_limit=False,
        num_threads=1,
        minloglevel=2,
        unk_id=ids[0],
        bos_id=ids[1],
        eos_id=ids[2],
        pad_id=ids[3],
    )
    return model.getvalue()


@contextmanager
def folder_of(model: bytes, file: str) -> Iterator[Path]:
    """A folder to load a tokenizer from, which is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="tokenizer-") as name:
        folder = Path(name)
        (folder / file).write_bytes(model)
        (folder / "tokenizer_config.json").write_text("{}")
        yield folder


@fixture("llama2")
def _llama2() -> Any:
    """BPE with byte fallback; a dummy prefix at the very start only."""
    with folder_of(train("bpe", bytes_=True), "tokenizer.model") as folder:
        tokenizer = LlamaTokenizer.from_pretrained(folder, legacy=False)
    tokenizer.chat_template = MISTRAL
    return tokenizer


@fixture("llama2-legacy")
def _llama2_legacy() -> Any:
    """The same from its JSON form: the prefix is put by a normalizer, after control tokens too."""
    backend = build("llama2").tokenizer.backend_tokenizer
    backend = Tokenizer.from_str(backend.to_str())
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend = _without_pre_tokenizer(backend)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        pad_token="<unk>",
        extra_special_tokens=["[INST]", "[/INST]", "<<SYS>>"],
    )
    tokenizer.chat_template = MISTRAL
    return tokenizer


def _without_pre_tokenizer(backend: Tokenizer) -> Tokenizer:
    tree = json.loads(backend.to_str())
    tree["pre_tokenizer"] = None
    return Tokenizer.from_str(json.dumps(tree))


@fixture("mistral-no-prefix")
def _mistral_tokens() -> Any:
    """Instruction markers as control tokens in the vocabulary itself."""
    names = ("[INST]", "[/INST]", "[AVAILABLE_TOOLS]")
    with folder_of(train("bpe", bytes_=True, names=names), "tokenizer.model") as folder:
        tokenizer = LlamaTokenizer.from_pretrained(
            folder, extra_special_tokens=list(names), add_prefix_space=False
        )
    tokenizer.chat_template = MISTRAL
    return tokenizer


@fixture("phi3")
def _phi3() -> Any:
    """Role markers that eat the white space behind them."""
    with folder_of(train("bpe", bytes_=True), "tokenizer.model") as folder:
        tokenizer = LlamaTokenizer.from_pretrained(folder, legacy=False, eos_token="<|endoftext|>")
    tokenizer.add_special_tokens(
        {
            "extra_special_tokens": [
                AddedToken(content, rstrip=True, special=True, normalized=False)
                for content in ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
            ]
        }
    )
    tokenizer.chat_template = PHI3
    return tokenizer


@fixture("gemma")
def _gemma() -> Any:
    """No prefix; line breaks, runs of spaces, tags and unused tokens among the added ones."""
    names = ("<start_of_turn>", "<end_of_turn>", "<b>", "</b>", *(f"<unused{i}>" for i in range(9)))
    names += ("\n", "\n\n", "▁▁", "▁▁▁")
    with folder_of(train("bpe", bytes_=True, names=names), "tokenizer.model") as folder:
        tokenizer = GemmaTokenizer.from_pretrained(
            folder, bos_token="<s>", eos_token="</s>", add_bos_token=True
        )
    tokenizer.add_special_tokens({"extra_special_tokens": ["<start_of_turn>", "<end_of_turn>"]})
    tokenizer.add_tokens(
        [
            AddedToken(n, normalized=False)
            for n in names
            if n.startswith(("<b", "</b", "<unu", "\n"))
        ]
    )
    tokenizer.chat_template = GEMMA
    return tokenizer


@fixture("unigram")
def _unigram() -> Any:
    """Unigram with byte fallback, control tokens in the vocabulary at the best score."""
    names = ("<|user|>", "<|end|>", "<sep>")
    model = sentencepiece.SentencePieceProcessor()
    model.LoadFromSerializedProto(train("unigram", bytes_=True, names=names))
    pieces = [(model.id_to_piece(i), model.get_score(i)) for i in range(model.get_piece_size())]
    backend = Tokenizer(models.Unigram(pieces, unk_id=model.unk_id(), byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        pad_token="<pad>",
        extra_special_tokens=["<|user|>", "<|end|>"],
    )
    tokenizer.add_tokens(["<sep>"])
    tokenizer.chat_template = ROLES
    return tokenizer


@fixture("unigram-nfkc", lossless=False)
def _unigram_nfkc() -> Any:
    """Normalized and lower-cased before look-up: other spellings reach the control tokens."""
    backend = Tokenizer.from_str(build("unigram").tokenizer.backend_tokenizer.to_str())
    backend.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        extra_special_tokens=["<|user|>", "<|end|>"],
    )
    tokenizer.chat_template = ROLES
    return tokenizer


@fixture("t5", lossless=False)
def _t5() -> Any:
    """Words at white space; a hundred sentinels; the end added by itself."""
    with folder_of(train("unigram", bytes_=False, t5_ids=True), "spiece.model") as folder:
        return T5Tokenizer.from_pretrained(folder)
