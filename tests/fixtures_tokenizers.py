"""Small tokenizers of every kind that transformers knows, trained at run time without a network.

Each has the features of a family in real life that matter where text meets control tokens. `build`
makes one by name; results are kept for the run.
"""

from __future__ import annotations

import base64
import functools
import io
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sentencepiece
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
from transformers import (
    BertGenerationTokenizer,
    BertTokenizer,
    ByT5Tokenizer,
    GemmaTokenizer,
    GPTSw3Tokenizer,
    LlamaTokenizer,
    PreTrainedTokenizer,
    PreTrainedTokenizerFast,
    T5Tokenizer,
)
from transformers.convert_slow_tokenizer import TikTokenConverter

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
    f"Line {i}: <b>{_WORDS[i % len(_WORDS)]}</b> (s) [x] |{i}| café naïve 東京 привет\n\n  done_{i}/{i};"
    for i in range(60)
)

ALPHABET = sorted(
    set("".join(SENTENCES)) | set("<|>[]/_#▁ INSTabcdefghijklmnopqrstuvwxyz0123456789XAFU")
)

_QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class Fixture:
    """A tokenizer and what its nature allows.

    Attributes:
        tokenizer: the tokenizer.
        lossless: whether decoding gives the text back, character by character.
    """

    tokenizer: Any
    lossless: bool


_BUILDERS: dict[str, tuple[Callable[[], Any], bool]] = {}


def _fixture(name: str, *, lossless: bool = True) -> Callable[[Callable[[], Any]], Any]:
    def register(builder: Callable[[], Any]) -> Callable[[], Any]:
        _BUILDERS[name] = (builder, lossless)
        return builder

    return register


@functools.cache
def build(name: str) -> Fixture:
    builder, lossless = _BUILDERS[name]
    return Fixture(builder(), lossless)


def _byte_level(
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


@functools.cache
def _sentencepiece(
    kind: str, *, bytes_: bool, names: tuple[str, ...] = (), t5_ids: bool = False
) -> bytes:
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
        **dict(zip(("unk_id", "bos_id", "eos_id", "pad_id"), ids, strict=True)),
    )
    return model.getvalue()


def _sp_folder(model: bytes, file: str) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="tokenizer-"))
    (folder / file).write_bytes(model)
    (folder / "tokenizer_config.json").write_text("{}")
    return folder


# Byte-level BPE


@_fixture("llama3")
def _llama3() -> Any:
    """Whole words looked up first; many reserved tokens; thinking markers that are not special."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=_byte_level(split=_QWEN_SPLIT, whole_words=True),
        bos_token="<|begin_of_text|>",
        eos_token="<|eot_id|>",
        extra_special_tokens=["<|start_header_id|>", "<|end_header_id|>"]
        + [f"<|reserved_special_token_{i}|>" for i in range(20)],
    )
    tokenizer.add_tokens(["<think>", "</think>"])
    tokenizer.chat_template = LLAMA3
    return tokenizer


@_fixture("qwen3", lossless=False)
def _qwen3() -> Any:
    """NFC normalizer, ChatML, tool markers that are not special; the unknown token ends a text."""
    backend = _byte_level(split=_QWEN_SPLIT)
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


@_fixture("gpt2")
def _gpt2() -> Any:
    """A base model: one token is beginning, end and unknown at once."""
    return PreTrainedTokenizerFast(
        tokenizer_object=_byte_level(),
        bos_token="<|endoftext|>",
        eos_token="<|endoftext|>",
        unk_token="<|endoftext|>",
    )


@_fixture("gpt2-prefix-space")
def _gpt2_prefix() -> Any:
    """A space put before each text, and after each control token; a beginning added by itself."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=_byte_level(prefix=True),
        bos_token="<|start|>",
        eos_token="<|end|>",
        add_bos_token=True,
    )
    tokenizer.chat_template = CHATML.replace("<|im_start|>", "<|start|>").replace(
        "<|im_end|>", "<|end|>"
    )
    return tokenizer


@_fixture("gpt-neox")
def _neox() -> Any:
    """Runs of spaces and a tab as added tokens, which are ordinary text."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=_byte_level(), eos_token="<|endoftext|>", pad_token="<|padding|>"
    )
    tokenizer.add_tokens([AddedToken(" " * n, normalized=False) for n in range(24, 1, -1)])
    tokenizer.add_tokens([AddedToken("\t\t", normalized=True), AddedToken("<|sep|>")])
    tokenizer.chat_template = ZEPHYR.replace("</s>", "<|endoftext|>")
    return tokenizer


@_fixture("tiktoken")
def _tiktoken() -> Any:
    """A tiktoken file converted."""
    vocabulary = _byte_level(split=_QWEN_SPLIT).get_vocab()
    alphabet = {chr(c): b for b, c in _byte_alphabet().items()}
    lines = [
        f"{base64.b64encode(bytes(alphabet[c] for c in piece)).decode()} {rank}"
        for piece, rank in sorted(vocabulary.items(), key=lambda item: item[1])
    ]
    with tempfile.NamedTemporaryFile("w", suffix=".tiktoken", delete=False) as file:
        file.write("\n".join(lines))
    specials = ["<|im_start|>", "<|im_end|>", "<|fim_prefix|>", "<|endoftext|>"]
    backend = TikTokenConverter(file.name, extra_special_tokens=specials).converted()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    tokenizer.chat_template = CHATML
    return tokenizer


def _byte_alphabet() -> dict[int, int]:
    """Byte -> code point of the character that byte-level BPE writes it with."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {b: b for b in shown} | {b: 256 + i for i, b in enumerate(hidden)}


# SentencePiece, converted


@_fixture("llama2")
def _llama2() -> Any:
    """BPE with byte fallback; a dummy prefix at the very start only."""
    folder = _sp_folder(_sentencepiece("bpe", bytes_=True), "tokenizer.model")
    tokenizer = LlamaTokenizer.from_pretrained(folder, legacy=False)
    tokenizer.chat_template = MISTRAL
    return tokenizer


@_fixture("llama2-legacy")
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
    import json

    tree = json.loads(backend.to_str())
    tree["pre_tokenizer"] = None
    return Tokenizer.from_str(json.dumps(tree))


@_fixture("mistral-no-prefix")
def _mistral_tokens() -> Any:
    """Instruction markers as control tokens in the vocabulary itself."""
    names = ("[INST]", "[/INST]", "[AVAILABLE_TOOLS]")
    folder = _sp_folder(_sentencepiece("bpe", bytes_=True, names=names), "tokenizer.model")
    tokenizer = LlamaTokenizer.from_pretrained(
        folder, extra_special_tokens=list(names), add_prefix_space=False
    )
    tokenizer.chat_template = MISTRAL
    return tokenizer


@_fixture("phi3")
def _phi3() -> Any:
    """Role markers that eat the white space behind them."""
    folder = _sp_folder(_sentencepiece("bpe", bytes_=True), "tokenizer.model")
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


@_fixture("gemma")
def _gemma() -> Any:
    """No prefix; line breaks, runs of spaces, tags and unused tokens among the added ones."""
    names = ("<start_of_turn>", "<end_of_turn>", "<b>", "</b>", *(f"<unused{i}>" for i in range(9)))
    names += ("\n", "\n\n", "▁▁", "▁▁▁")
    folder = _sp_folder(_sentencepiece("bpe", bytes_=True, names=names), "tokenizer.model")
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


@_fixture("unigram")
def _unigram() -> Any:
    """Unigram with byte fallback, control tokens in the vocabulary at the best score."""
    names = ("<|user|>", "<|end|>", "<sep>")
    model = sentencepiece.SentencePieceProcessor()
    model.LoadFromSerializedProto(_sentencepiece("unigram", bytes_=True, names=names))
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


@_fixture("unigram-nfkc", lossless=False)
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


@_fixture("t5", lossless=False)
def _t5() -> Any:
    """Words at white space; a hundred sentinels; the end added by itself."""
    folder = _sp_folder(_sentencepiece("unigram", bytes_=False, t5_ids=True), "spiece.model")
    return T5Tokenizer.from_pretrained(folder)


# Words


@_fixture("bert", lossless=False)
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


@_fixture("words", lossless=False)
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


@_fixture("lower-bytes", lossless=False)
def _lower() -> Any:
    """Added tokens matched after lower-casing, one eating white space, one only as a word."""
    backend = _byte_level()
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


# Run in Python


@_fixture("byt5")
def _byt5() -> Any:
    """Bytes in Python."""
    return ByT5Tokenizer(extra_ids=12)


@_fixture("sp-slow-bpe")
def _sp_slow_bpe() -> Any:
    """SentencePiece in Python, with its dummy prefix, and a user-defined marker."""
    names = ("<|im_start|>", "<|im_end|>")
    folder = _sp_folder(_sentencepiece("bpe", bytes_=True, names=names), "spiece.model")
    tokenizer = BertGenerationTokenizer(
        str(folder / "spiece.model"), extra_special_tokens=list(names)
    )
    tokenizer.add_tokens(["<think>"])
    tokenizer.chat_template = CHATML
    return tokenizer


@_fixture("sp-slow-unigram")
def _sp_slow_unigram() -> Any:
    """SentencePiece in Python without a dummy prefix."""
    folder = _sp_folder(_sentencepiece("unigram", bytes_=True), "spiece.model")
    tokenizer = BertGenerationTokenizer(str(folder / "spiece.model"), legacy=False)
    tokenizer.add_special_tokens({"extra_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = CHATML
    return tokenizer


@_fixture("gpt-sw3", lossless=False)
def _gpt_sw3() -> Any:
    """SentencePiece in Python with its own cleaning of the text."""
    folder = _sp_folder(_sentencepiece("bpe", bytes_=True), "spiece.model")
    return GPTSw3Tokenizer(str(folder / "spiece.model"))


class BytePairs(PreTrainedTokenizer):
    """A tokenizer in Python in the manner of tiktoken: bytes, then merges by rank."""

    model_input_names = ["input_ids", "attention_mask"]

    def __init__(self, **kwargs: Any) -> None:
        self._backend = _byte_level(500)
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
        alphabet = {chr(c): b for b, c in _byte_alphabet().items()}
        data = b"".join(
            token.encode()
            if token in self.added_tokens_encoder
            else bytes(alphabet[c] for c in token)
            for token in tokens
        )
        return data.decode(errors="replace")


@_fixture("python-bytes")
def _python_bytes() -> Any:
    """Merges in Python; runs of spaces added, a marker that is not special."""
    tokenizer = BytePairs(bos_token="<|begin|>", eos_token="<|endoftext|>")
    tokenizer.add_special_tokens({"extra_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.add_tokens([AddedToken("    "), "<think>"])
    tokenizer.chat_template = CHATML
    return tokenizer


class Words(PreTrainedTokenizer):
    """Lower-cased words and signs in Python; its vocabulary holds its control tokens."""

    model_input_names = ["input_ids", "attention_mask"]

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


@_fixture("python-words", lossless=False)
def _python_words() -> Any:
    """White-space words in Python: a control token's spelling is a word like others."""
    tokenizer = Words(unk_token="<unk>", bos_token="<s>", eos_token="</s>")
    tokenizer.add_tokens(["<sep>"])
    return tokenizer


# Chat templates in the manner of the families they are named after.

LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n"
    "{{ m['content'] | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% set ns = namespace(system='', turns=messages) %}"
    "{% if messages[0].role == 'system' %}{% set ns.system = messages[0].content + '\n\n' %}"
    "{% set ns.turns = messages[1:] %}{% endif %}"
    "{% for m in ns.turns %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must go user, assistant, user, assistant') }}{% endif %}"
    "{% if m.role == 'user' %}[INST] {{ (ns.system if loop.first else '') + m.content.strip() }} [/INST]"
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
PHI3 = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}"
)
ZEPHYR = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
ROLES = (
    "{{ bos_token }}{% for m in messages %}<|user|>{{ m.role }}: {{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|user|>assistant:{% endif %}"
)
READER = (
    "<|begin|>{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

NAMES = tuple(_BUILDERS)
