"""Small tokenizers of every kind that transformers knows, trained at run time without a network.

Each has the features of a family in real life that matter where text meets control tokens.
``build`` makes one by name; results are kept for the run.
"""

from __future__ import annotations

import functools
import io
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

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
    AutoTokenizer,
    BertGenerationTokenizer,
    BertTokenizer,
    ByT5Tokenizer,
    GemmaTokenizer,
    LlamaTokenizer,
    PreTrainedTokenizer,
    PreTrainedTokenizerFast,
    T5Tokenizer,
)

import rag_windows

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


CHATML = turns("<|im_start|>ROLE\n", "<|im_end|>\n")


@dataclass(frozen=True)
class Fixture:
    """A tokenizer, and whether decoding gives the text back, character by character."""

    tokenizer: Any
    lossless: bool


Builder = Callable[[], Any]
BUILDERS: dict[str, tuple[Builder, bool]] = {}


def fixture(name: str, *, lossless: bool = True) -> Callable[[Builder], Builder]:
    def register(builder: Builder) -> Builder:
        BUILDERS[name] = (builder, lossless)
        return builder

    return register


@functools.cache
def build(name: str) -> Fixture:
    builder, lossless = BUILDERS[name]
    return Fixture(builder(), lossless)


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
    tokenizer.chat_template = turns("<|start|>ROLE\n", "<|end|>\n")
    return tokenizer


@fixture("gpt-neox")
def _neox() -> Any:
    """Runs of spaces and a tab as added tokens, which are ordinary text."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=byte_level(), eos_token="<|endoftext|>", pad_token="<|padding|>"
    )
    tokenizer.add_tokens([AddedToken(" " * n, normalized=False) for n in range(24, 1, -1)])
    tokenizer.add_tokens([AddedToken("\t\t", normalized=True), AddedToken("<|sep|>")])
    tokenizer.chat_template = turns("<|ROLE|>\n", "<|endoftext|>\n")
    return tokenizer


@fixture("chatml")
def _chatml() -> Any:
    """Bytes, nothing normalized, nothing put before a text."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=byte_level(split=QWEN_SPLIT),
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=["<|im_start|>", "<|fim_prefix|>"],
    )
    tokenizer.chat_template = CHATML
    return tokenizer


@fixture("tiny-reader")
def _tiny_reader() -> Any:
    """The embedded reader's own."""
    folder = Path(rag_windows.__file__).parent / "models" / "tiny-reader"
    return AutoTokenizer.from_pretrained(folder)


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
    backend.pre_tokenizer = None
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
    tokenizer.chat_template = turns("<|ROLE|>\n", "<|end|>\n")
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
    tokenizer.chat_template = turns("<|user|>ROLE: ", "<|end|>", "{{ bos_token }}")
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
    tokenizer.chat_template = turns("<|user|>ROLE: ", "<|end|>", "{{ bos_token }}")
    return tokenizer


@fixture("t5", lossless=False)
def _t5() -> Any:
    """Words at white space; a hundred sentinels; the end added by itself."""
    with folder_of(train("unigram", bytes_=False, t5_ids=True), "spiece.model") as folder:
        return T5Tokenizer.from_pretrained(folder)


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
    tokenizer.chat_template = turns("<|ROLE|>", "<|end|>", "<|begin|>")
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
    tokenizer.chat_template = turns("<|S|>ROLE\n", "<|E|>\n")
    return tokenizer


NAMES = tuple(BUILDERS)
