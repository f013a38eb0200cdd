"""Small seeded models that keep states, with the byte tokenizer of `small`."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from rag_windows import WindowedLM
from tests.parity.states import OPTIONS
from tests.parity.zoo import draw
from tests.rag_windows import small

NAMES = ("qwen3_5_text", "mamba2", "jamba", "gemma3n_text")


def build(name: str = "qwen3_5_text", seed: int = 0) -> PreTrainedModel:
    """A new model of this type, fp32, in evaluation mode."""
    size = len(small.tokenizer())
    options: dict[str, Any] = {**OPTIONS[name], "vocab_size": size}
    options |= {key: small.SHAPE[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    for key, value in (
        ("max_position_embeddings", small.POSITIONS),
        ("vocab_size_per_layer_input", size),
    ):
        if key in options:
            options[key] = value
    config = CONFIG_MAPPING[name](**options)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    draw(model, seed)
    return model


@cache
def model(name: str = "qwen3_5_text") -> PreTrainedModel:
    """The one that tests share. Never change it."""
    return build(name)


def wrapped(name: str = "qwen3_5_text", **options: Any) -> WindowedLM:
    """An engine of its own on the shared model."""
    return WindowedLM.from_pretrained(model(name), tokenizer=small.tokenizer(), **options)


@cache
def lm(name: str = "qwen3_5_text") -> WindowedLM:
    """The wrapped model that tests share."""
    return wrapped(name)
