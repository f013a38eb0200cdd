"""Small tokenizers of every kind that serves causal models, trained at run time without a network.

Each has the features of a family in real life that matter where text meets control tokens.
``build`` makes one by name; results are kept for the run.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from typing import Any

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
from transformers import BertTokenizer, PreTrainedTokenizerFast

_WORDS = (
    "the harbour of a quiet town opened in spring after its founder sold every ship and built one "
    "long white wall against wind rain sea salt then children asked who what where when why how "
    "answer question passage title think start end user model system assistant tool call file "
    "header text return turn begin of sentence reserved special token pad mask unused inst sys eot"
).split()

SENTENCES = tuple(
    " ".join(
        _WORDS[(i * 7 + j * (i % 11 + 1)) % len(_WORDS)] for j in range(3 + i % 9)
    ).capitalize()
    + ".?!"[i % 3]
    for i in range(400)
) + tuple(
    f"Line {i}: <b>{_WORDS[i % len(_WORDS)]}</b> (s) [x] |{i}| "
    f"café naïve 東京 привет\n\n  done_{i}/{i};"
    for i in range(60)
)

ALPHABET = sorted(
    set("".join(SENTENCES)) | set("<|>[]/_#▁ INSTabcdefghijklmnopqrstuvwxyz0123456789XAFU")
)


LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n"
    "{{ m['content'] | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% set ns = namespace(system='', turns=messages) %}"
    "{% if messages[0].role == 'system' %}{% set ns.system = messages[0].content + '\n\n' %}"
    "{% set ns.turns = messages[1:] %}{% endif %}"
    "{% for m in ns.turns %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must go user, assistant, user, assistant') }}{% endif %}"
    "{% if m.role == 'user' %}"
    "[INST] {{ (ns.system if loop.first else '') + m.content.strip() }} [/INST]"
    "{% else %} {{ m.content.strip() }}{{ eos_token }}{% endif %}{% endfor %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}"
    "{{ raise_exception('no system role here') }}{% endif %}"
    "{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
QWEN3 = (
    "{% for m in messages %}{% set text = m.content %}"
    "{% if m.role == 'assistant' and '</think>' in text %}"
    "{% set text = text.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ text }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
    "{% endif %}"
)


def turns(begin: str, end: str, opening: str = "") -> str:
    """A template that writes each message between two markers."""
    shown = begin.replace("ROLE", "{{ m.role }}")
    return (
        f"{opening}{{% for m in messages %}}{shown}{{{{ m.content }}}}{end}{{% endfor %}}"
        f"{{% if add_generation_prompt %}}{begin.replace('ROLE', 'assistant')}{{% endif %}}"
    )


SENTENCEPIECE = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def fast(
    backend: Tokenizer, template: str | None = None, added: Sequence[Any] = (), **special: Any
) -> PreTrainedTokenizerFast:
    """A tokenizer with a chat template and further tokens."""
    made = PreTrainedTokenizerFast(tokenizer_object=backend, **special)
    made.add_tokens(list(added))
    made.chat_template = template
    return made


QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def byte_level(*, own_split: bool = False, prefix: bool = False) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(ignore_merges=own_split))
    stages: list[Any] = [pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=not own_split)]
    if own_split:
        stages.insert(0, pre_tokenizers.Split(Regex(QWEN_SPLIT), "isolated"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(stages)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=700, show_progress=False, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(SENTENCES, trainer)
    return tokenizer


def llama3() -> Any:
    """Whole words looked up first; many reserved tokens; thinking markers that are not special."""
    reserved = [f"<|reserved_special_token_{i}|>" for i in range(20)]
    return fast(
        byte_level(own_split=True),
        LLAMA3,
        ["<think>", "</think>"],
        bos_token="<|begin_of_text|>",
        eos_token="<|eot_id|>",
        extra_special_tokens=["<|start_header_id|>", "<|end_header_id|>", *reserved],
    )


def qwen3() -> Any:
    """NFC normalizer, ChatML, tool markers that are not special; the unknown token ends a text."""
    backend = byte_level(own_split=True)
    backend.normalizer = normalizers.NFC()
    markers = ("<tool_call>", "</tool_call>", "<think>", "</think>")
    return fast(
        backend,
        QWEN3,
        [AddedToken(marker, normalized=False) for marker in markers],
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        unk_token="<|endoftext|>",
        extra_special_tokens=["<|im_start|>"],
    )


def gpt2() -> Any:
    """A base model: one token is beginning, end and unknown at once."""
    end = "<|endoftext|>"
    return fast(byte_level(), bos_token=end, eos_token=end, unk_token=end)


def gpt2_prefix() -> Any:
    """A space put before each text, and after each control token; a beginning added by itself."""
    return fast(
        byte_level(prefix=True),
        turns("<|start|>ROLE\n", "<|end|>\n"),
        bos_token="<|start|>",
        eos_token="<|end|>",
        add_bos_token=True,
    )


def gpt_neox() -> Any:
    """Runs of spaces and a tab as added tokens, which are ordinary text."""
    spaces = [AddedToken(" " * n, normalized=False) for n in range(24, 1, -1)]
    return fast(
        byte_level(),
        turns("<|ROLE|>\n", "<|endoftext|>\n"),
        [*spaces, AddedToken("\t\t", normalized=True), AddedToken("<|sep|>")],
        eos_token="<|endoftext|>",
        pad_token="<|padding|>",
    )


BYTES = tuple(f"<0x{byte:02X}>" for byte in range(256))


def bytes_behind(words: dict[str, int], names: tuple[str, ...]) -> dict[str, int]:
    """A vocabulary as SentencePiece lays it out: control tokens, bytes, then what was learnt."""
    listed = ["<unk>", "<s>", "</s>", *names, *BYTES]
    return {word: index for index, word in enumerate(dict.fromkeys([*listed, *words]))}


def metaspaced(*names: str) -> Tokenizer:
    """BPE with byte fallback; a space is a sign of its own, also before the text."""
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=500, show_progress=False, initial_alphabet=ALPHABET)
    learner.train_from_iterator(SENTENCES, trainer)
    merges = json.loads(learner.to_str())["model"]["merges"]
    backend = Tokenizer(
        models.BPE(
            vocab=bytes_behind(learner.get_vocab(), names),
            merges=[tuple(merge) for merge in merges],
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = from_metaspace()
    return backend


def from_metaspace() -> decoders.Decoder:
    stages = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    return decoders.Sequence([*stages, decoders.Strip(" ", 1, 0)])


def llama2() -> Any:
    """BPE with byte fallback; a dummy prefix at the very start only."""
    return fast(metaspaced(), MISTRAL, **SENTENCEPIECE)


def llama2_legacy() -> Any:
    """The prefix is put by a normalizer, after control tokens too."""
    backend = metaspaced()
    prefix = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    backend.normalizer = normalizers.Sequence(prefix)
    backend.pre_tokenizer = None
    markers = ["[INST]", "[/INST]", "<<SYS>>"]
    return fast(backend, MISTRAL, extra_special_tokens=markers, **SENTENCEPIECE)


def gemma() -> Any:
    """No prefix; line breaks, runs of spaces, tags and unused tokens among the added ones."""
    roles = ["<start_of_turn>", "<end_of_turn>"]
    tags = ("<b>", "</b>", *(f"<unused{i}>" for i in range(9)), "\n", "\n\n")
    backend = metaspaced(*roles, *tags, "▁▁", "▁▁▁")
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    stages = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(stages)
    added = [AddedToken(tag, normalized=False) for tag in tags]
    special = {"extra_special_tokens": roles, "add_bos_token": True, **SENTENCEPIECE}
    return fast(backend, GEMMA, added, **special)


def unigram(normalizer: Any = None) -> Any:
    """Unigram with byte fallback, control tokens in the vocabulary at the best score."""
    learner = Tokenizer(models.Unigram())
    learner.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=400, show_progress=False, initial_alphabet=[*ALPHABET, "\n"], unk_token="<unk>"
    )
    learner.train_from_iterator(SENTENCES, trainer)
    scores = dict(json.loads(learner.to_str())["model"]["vocab"])
    names = ("<|user|>", "<|end|>", "<sep>")
    words = bytes_behind(scores, names)
    pieces = [(word, 0.0 if word in names else scores.get(word, -20.0)) for word in words]
    backend = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    backend.normalizer = normalizer
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = from_metaspace()
    template = turns("<|user|>ROLE: ", "<|end|>", "{{ bos_token }}")
    return fast(backend, template, ["<sep>"], extra_special_tokens=names[:2], **SENTENCEPIECE)


def unigram_nfkc() -> Any:
    """Normalized and lower-cased before look-up: other spellings reach the control tokens."""
    return unigram(normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()]))


def bert() -> Any:
    """WordPiece, lower case, accents stripped."""
    backend = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(
        vocab_size=500,
        special_tokens=["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"],
        show_progress=False,
        initial_alphabet=list(set("".join(ALPHABET).lower())),
    )
    backend.train_from_iterator(SENTENCES, trainer)
    tokenizer = BertTokenizer(vocab=backend.get_vocab())
    tokenizer.add_tokens([AddedToken("covid", single_word=True), "[unused1]"])
    return tokenizer


def lower_bytes() -> Any:
    """Added tokens matched after lower-casing, one eating white space, one only as a word."""
    backend = byte_level()
    backend.normalizer = normalizers.Lowercase()
    strip = AddedToken("<Strip>", normalized=True, lstrip=True, rstrip=True)
    solo = AddedToken("Solo", normalized=True, single_word=True)
    return fast(
        backend,
        turns("<|S|>ROLE\n", "<|E|>\n"),
        [AddedToken("<Think>", normalized=True), strip, solo],
        bos_token="<|S|>",
        eos_token="<|E|>",
    )


BUILDERS = {
    "llama3": llama3,
    "qwen3": qwen3,
    "gpt2": gpt2,
    "gpt2-prefix-space": gpt2_prefix,
    "gpt-neox": gpt_neox,
    "llama2": llama2,
    "llama2-legacy": llama2_legacy,
    "gemma": gemma,
    "unigram": unigram,
    "unigram-nfkc": unigram_nfkc,
    "bert": bert,
    "lower-bytes": lower_bytes,
}
NAMES = tuple(BUILDERS)
CHAT = tuple(name for name in NAMES if name not in ("gpt2", "bert"))
"""Those with a chat template."""
LOSSLESS = set(NAMES) - {"qwen3", "unigram-nfkc", "bert", "lower-bytes"}
"""Where decoding gives the text back, character by character."""


@functools.cache
def build(name: str) -> Any:
    """The tokenizer of this name, made once."""
    return BUILDERS[name]()
