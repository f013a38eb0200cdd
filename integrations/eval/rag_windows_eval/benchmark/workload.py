"""The model that is timed, and text for it with a known number of tokens."""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from rag_windows.errors import InputError
from rag_windows.interchange import PromptParts
from rag_windows.loading import load as load_model
from rag_windows.loading import load_config
from rag_windows.model import WindowedLM
from rag_windows.passage import Passage
from rag_windows_eval.benchmark.result import BenchPlan

PREFIX_TOKENS = QUERY_TOKENS = 32
_POSITIONS = 262_144

DEFAULT = "llama-0.25b"
SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size"),
    *("num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
)
_ROPE = {"rope_parameters": {"rope_theta": 500_000.0, "rope_type": "default"}}
SHAPES: dict[str, tuple[str, tuple[int, ...], dict[str, Any]]] = {
    DEFAULT: ("llama", (32_000, 1024, 2816, 16, 16, 4), {}),
    "qwen3.5-0.3b": (
        "qwen3_5_text",
        (32_000, 1024, 2816, 16, 8, 2),
        {"head_dim": 128, "linear_num_value_heads": 16},
    ),
    "qwen-0.5b": ("qwen2", (151_936, 896, 4864, 24, 14, 2), {"tie_word_embeddings": True}),
    "llama-3.1-8b": ("llama", (128_256, 4096, 14_336, 32, 32, 8), _ROPE),
    "tiny": ("llama", (512, 128, 384, 2, 4, 2), {}),
}
"""Families, `SIZES` and more of models whose weights are drawn at random; "tiny" is for tests and
says nothing about speed."""

_PAD, _BEGIN, _UNKNOWN = "<pad>", "<s>", "<unk>"
_ROLES = [f"<|{role}|>" for role in ("system", "user", "assistant")]
_TEMPLATE = (
    "<s>{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def config_of(plan: BenchPlan) -> PreTrainedConfig:
    """The configuration of what is timed."""
    if plan.model is not None:
        return load_config(plan.model).get_text_config(decoder=True)
    special = {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
    family, sizes, more = SHAPES[plan.shape or DEFAULT]
    named = dict(zip(SIZES, sizes, strict=True))
    return AutoConfig.for_model(
        family, max_position_embeddings=_POSITIONS, **named, **special, **more
    )


def build(plan: BenchPlan) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model, in evaluation mode, on its device and in its precision, and its tokenizer."""
    dtype = getattr(torch, plan.dtype)
    if plan.model is not None:
        model, own = load_model(plan.model, None, dtype=dtype, device_map=plan.device)
        return model.eval(), own
    config = config_of(plan)
    torch.manual_seed(0)
    with torch.device(plan.device):
        made: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return made.eval(), tokenizer(config.vocab_size)


def tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """A tokenizer of so many tokens, one for each word, with a chat template."""
    special = [_PAD, _BEGIN, _UNKNOWN, *_ROLES]
    words = [*special, *(f"w{number}" for number in range(len(special), vocabulary))]
    numbered = {word: number for number, word in enumerate(words)}
    backend = Tokenizer(models.WordLevel(numbered, unk_token=_UNKNOWN))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=_BEGIN, pad_token=_PAD, unk_token=_UNKNOWN
    )
    made.add_special_tokens({"additional_special_tokens": _ROLES})
    made.chat_template = _TEMPLATE
    return made


def head_dim(config: PreTrainedConfig) -> int:
    """Size of the keys and values of one head."""
    own = getattr(config, "head_dim", None)
    return int(own or config.hidden_size // config.num_attention_heads)


def token_bytes(model: PreTrainedModel) -> int:
    """Bytes of the keys and values of one token, all layers that have them."""
    config = model.config.get_text_config(decoder=True)
    kinds = getattr(config, "layer_types", None) or ["attention"] * config.num_hidden_layers
    layers = sum("linear" not in kind for kind in kinds)
    numbers = layers * 2 * config.num_key_value_heads * head_dim(config)
    return int(numbers * next(model.parameters()).element_size())


def weight_bytes(model: PreTrainedModel) -> int:
    """Bytes of all weights."""
    return sum(parameter.nbytes for parameter in model.parameters())


def step_bytes(model: PreTrainedModel, context: int) -> int:
    """What every decode step reads: all weights, and the keys and values of a context once.

    Of an embedding table that the vocabulary layer does not share, one row is read.
    """
    table, head = model.get_input_embeddings().weight, model.get_output_embeddings()
    unread = 0 if head is not None and head.weight is table else table.nbytes
    return weight_bytes(model) - unread + context * token_bytes(model)


@dataclass(frozen=True, slots=True)
class Workload:
    """One question over passages, as text and in the tokens that it comes to."""

    system: str
    passages: tuple[Passage, ...]
    question: str
    parts: PromptParts

    @property
    def windows(self) -> list[tuple[int, ...]]:
        """Token ids of each window."""
        return [window.ids for window in self.parts.windows]

    @property
    def prompt(self) -> list[int]:
        """The same tokens as one prompt."""
        return [
            *self.parts.prefix_ids,
            *(token for ids in self.windows for token in ids),
            *self.parts.query_ids,
        ]

    def shortened(self, windows: int) -> Workload:
        """The same over only the first passages."""
        parts = replace(self.parts, windows=self.parts.windows[:windows])
        return replace(self, passages=self.passages[:windows], parts=parts)


class BenchTexts:
    """Questions over random words that a model's tokenizer knows.

    Every passage has a title, and its window, header and blank line included, as many tokens as
    words can give it and at most ``window``: exactly so many with the `tokenizer` made here.

    Args:
        context: tokens of all passages of a question.
        window: tokens of a passage.
    """

    def __init__(self, lm: WindowedLM, context: int, window: int) -> None:
        self._lm, self._prompt = lm, lm.engine.text.prompt
        self._count, self._window = context // window, window
        vocabulary = {token.lstrip("Ġ▁") for token in lm.tokenizer.get_vocab()}
        self._words = sorted(word for word in vocabulary if word.isascii() and word.isalnum())
        if not self._words:
            raise InputError(
                "The tokenizer has no token that is a whole word, so no passages can "
                "be made. Use another --model."
            )

    def workload(self, seed: int = 0) -> Workload:
        """A question over passages of its own."""
        generator = random.Random(seed)
        around, word = self._prompt.around, self._words[0]
        system = self._fitting(
            generator, PREFIX_TOKENS, lambda text: around(word, prefix=text or None)[0]
        )
        question = self._fitting(
            generator, QUERY_TOKENS, lambda text: around(text or word, prefix=system)[1]
        )
        passages = [self._passage(generator) for _ in range(self._count)]
        return self._workload(system, passages, question)

    def sharing(self, questions: int) -> list[Workload]:
        """Questions of which any two share half of their passages, in different orders."""
        base = self.workload()
        common = base.passages[: self._count // 2]
        generator = random.Random(0)
        made = []
        for number in range(questions):
            own = self.workload(seed=1 + number)
            passages = [*common, *own.passages[len(common) :]]
            generator.shuffle(passages)
            made.append(self._workload(base.system, passages, own.question))
        return made

    def _passage(self, generator: random.Random) -> Passage:
        title = generator.choice(self._words)
        text = self._fitting(
            generator,
            self._window,
            lambda text: self._prompt.encode_text(f"{title}\n{text}\n\n", continuation=True),
        )
        return Passage(text, title=title)

    def _fitting(
        self, generator: random.Random, tokens: int, encode: Callable[[str], Sequence[int]]
    ) -> str:
        """As many words as fit into so many tokens, with the text around them; at least one."""
        drawn = generator.choices(self._words, k=tokens)
        fitting = bisect_right(
            range(tokens + 1), tokens, key=lambda count: len(encode(" ".join(drawn[:count])))
        )
        return " ".join(drawn[: max(1, fitting - 1)])

    def _workload(self, system: str, passages: Sequence[Passage], question: str) -> Workload:
        longest = self._lm.max_window_tokens
        parts = self._prompt.build(question, passages, prefix=system, max_window_tokens=longest)
        if parts.notes or max(len(one.ids) for one in parts.windows) > self._window:
            raise InputError(
                f"Passages of {self._window} tokens are too short for this tokenizer or too long "
                "for its model. Use another --window."
            )
        return Workload(system, tuple(passages), question, parts)
