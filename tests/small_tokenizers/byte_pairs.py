"""Byte-level BPE."""

from __future__ import annotations

import base64
import os
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import TikTokenConverter

import rag_windows
from tests.small_tokenizers.corpus import SENTENCES
from tests.small_tokenizers.registry import fixture
from tests.small_tokenizers.templates import CHATML, LLAMA3, QWEN3, ZEPHYR

QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def byte_level(
    size: int = 700, *, split: str | None = None, prefix: bool = False, whole_words: bool = False
) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(ignore_merges=whole_words))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=split is None)
    tokenizer.pre_tokenizer = (
        byte_level
        if split is None
        else pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(split), "isolated"), byte_level])
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        show_progress=False,
        special_tokens=[],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    return tokenizer


def byte_alphabet() -> dict[int, int]:
    """Byte -> code point of the character that byte-level BPE writes it with."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {b: b for b in shown} | {b: 256 + i for i, b in enumerate(hidden)}


@fixture("llama3")
def _llama3() -> Any:
    """Whole words looked up first; many reserved tokens; thinking markers that are not special."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=byte_level(split=QWEN_SPLIT, whole_words=True),
        bos_token="<|begin_of_text|>",
        eos_token="<|eot_id|>",
        extra_special_tokens=["<|start_header_id|>", "<|end_header_id|>"]
        + [f"<|reserved_special_token_{i}|>" for i in range(20)],
    )
    tokenizer.add_tokens(["<think>", "</think>"])
    tokenizer.chat_template = LLAMA3
    return tokenizer


@fixture("qwen3", lossless=False)
def _qwen3() -> Any:
    """NFC normalizer, ChatML, tool markers that are not special; the unknown token ends a text."""
    backend = byte_level(split=QWEN_SPLIT)
    backend.normalizer = normalizers.NFC()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        unk_token="<|endoftext|>",
        extra_special_tokens=["<|im_start|>"],
    )
    tokenizer.add_tokens(
        [
            AddedToken(content, normalized=False)
            for content in ("<tool_call>", "</tool_call>", "<think>", "</think>")
        ]
    )
    tokenizer.chat_template = QWEN3
    return tokenizer


@fixture("gpt2")
def _gpt2() -> Any:
    """A base model: one token is beginning, end and unknown at once."""
    return PreTrainedTokenizerFast(
        tokenizer_object=byte_level(),
        bos_token="<|endoftext|>",
        eos_token="<|endoftext|>",
        unk_token="<|endoftext|>",
    )


@fixture("gpt2-prefix-space")
def _gpt2_prefix() -> Any:
    """A space put before each text, and after each control token; a beginning added by itself."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=byte_level(prefix=True),
        bos_token="<|start|>",
        eos_token="<|end|>",
        add_bos_token=True,
    )
    tokenizer.chat_template = CHATML.replace("<|im_start|>", "<|start|>").replace(
        "<|im_end|>", "<|end|>"
    )
    return tokenizer


@fixture("gpt-neox")
def _neox() -> Any:
    """Runs of spaces and a tab as added tokens, which are ordinary text."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=byte_level(), eos_token="<|endoftext|>", pad_token="<|padding|>"
    )
    tokenizer.add_tokens([AddedToken(" " * n, normalized=False) for n in range(24, 1, -1)])
    tokenizer.add_tokens([AddedToken("\t\t", normalized=True), AddedToken("<|sep|>")])
    tokenizer.chat_template = ZEPHYR.replace("</s>", "<|endoftext|>")
    return tokenizer


@fixture("tiktoken")
def _tiktoken() -> Any:
    """A tiktoken file converted."""
    vocabulary = byte_level(split=QWEN_SPLIT).get_vocab()
    alphabet = {chr(c): b for b, c in byte_alphabet().items()}
    lines = [
        f"{base64.b64encode(bytes(alphabet[c] for c in piece)).decode()} {rank}"
        for piece, rank in sorted(vocabulary.items(), key=lambda item: item[1])
    ]
    specials = ["<|im_start|>", "<|im_end|>", "<|fim_prefix|>", "<|endoftext|>"]
    # Where no folder is named, tiktoken keeps a copy of what it reads among the temporary files.
    with (
        tempfile.TemporaryDirectory(prefix="tokenizer-") as folder,
        mock.patch.dict(os.environ, TIKTOKEN_CACHE_DIR=""),
    ):
        file = Path(folder) / "ranks.tiktoken"
        file.write_text("\n".join(lines))
        backend = TikTokenConverter(str(file), extra_special_tokens=specials).converted()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    tokenizer.chat_template = CHATML
    return tokenizer


@fixture("tiny-reader")
def _tiny_reader() -> Any:
    """The embedded reader's own."""
    folder = Path(rag_windows.__file__).parent / "models" / "tiny-reader"
    return AutoTokenizer.from_pretrained(folder)
