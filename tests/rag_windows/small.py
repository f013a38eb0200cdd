"""A small seeded Llama with a byte tokenizer: enough for everything but sensible answers."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest import mock

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from rag_windows import BatchRequest, WindowedLM
from rag_windows.request import Request

TEMPLATE = (
    "<s>{% for m in messages %}<|{{ m.role }}|>{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ["<s>", "</s>", "<pad>", "<|system|>", "<|user|>", "<|assistant|>"]
POSITIONS = 1024


@cache
def tokenizer(size: int = 0) -> PreTrainedTokenizerFast:
    """One token a byte, and a chat template; at least so many tokens."""
    names = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    names += [f"<unused{number}>" for number in range(size - len(names))]
    vocabulary = {token: index for index, token in enumerate(names)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    made.add_special_tokens({"additional_special_tokens": SPECIAL[3:]})
    made.chat_template = TEMPLATE
    return made


SHAPE: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": POSITIONS,
    "initializer_range": 0.2,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    # What most tests are about reads all windows; tests/blackbox/test_auto.py has the default.
    "rag_windows_method": "ape",
}


def build(seed: int = 0, **changes: Any) -> LlamaForCausalLM:
    """Two layers, grouped heads, fp32; weights large enough that attention is uneven."""
    torch.manual_seed(seed)
    config = LlamaConfig(**{"vocab_size": len(tokenizer()), **SHAPE, **changes})
    return LlamaForCausalLM(config).eval()


@cache
def model(seed: int = 0) -> LlamaForCausalLM:
    """The one that tests share. Never change it."""
    return build(seed)


def wrapped(**options: Any) -> WindowedLM:
    """An engine of its own on the shared model."""
    return WindowedLM.from_pretrained(model(), tokenizer=tokenizer(), **options)


def templated(template: str | None, **options: Any) -> WindowedLM:
    """The shared model with another chat template, or with none."""
    made = copy.deepcopy(tokenizer())
    made.chat_template = template
    return WindowedLM.from_pretrained(model(), tokenizer=made, **options)


@cache
def lm() -> WindowedLM:
    """The wrapped model that tests share, method "ape"."""
    return wrapped()


def request(lm: WindowedLM, query: Any, passages: Any = (), **arguments: Any) -> Request:
    """A question with `WindowedLM.generate`'s arguments, checked and not answered."""
    return Request.of(lm.engine, BatchRequest(query, passages, **arguments))


def before(text: str, *stop: str) -> str:
    """What of a text stands in front of all of these strings."""
    return min((text.partition(one)[0] for one in stop), key=len, default=text)


@contextmanager
def passes() -> Iterator[list[int]]:
    """How many tokens each forward pass embeds meanwhile, of whatever model, in any thread.

    A model with learned positions embeds them, too. No hook is set: to a cache, a model with one
    is another model.
    """
    made: list[int] = []
    embed = torch.nn.functional.embedding

    def noted(ids: torch.Tensor, *given: Any, **options: Any) -> torch.Tensor:
        made.append(ids.numel())
        return embed(ids, *given, **options)

    with mock.patch.object(torch.nn.functional, "embedding", noted):
        yield made
