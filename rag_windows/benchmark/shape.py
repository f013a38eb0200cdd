"""What is timed: models of known shapes with random weights, made at run time, or trained ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from rag_windows.errors import InputError
from rag_windows.loading import load, load_config

_POSITIONS = 262_144


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape of a model; its weights say nothing, its speed is that of a trained one.

    Attributes:
        name: as on the command line.
        model_type: of transformers.
        sizes: of the configuration.
    """

    name: str
    model_type: str
    sizes: Mapping[str, Any]

    @property
    def head_dim(self) -> int:
        """Of keys and values."""
        return int(self.sizes["hidden_size"] // self.sizes["num_attention_heads"])

    def build(self, device: str, dtype: torch.dtype, seed: int = 0) -> PreTrainedModel:
        """The model, in evaluation mode, made on its device and in its precision."""
        config = AutoConfig.for_model(
            self.model_type,
            **self.sizes,
            max_position_embeddings=_POSITIONS,
            bos_token_id=1,
            eos_token_id=None,
            pad_token_id=0,
        )
        torch.manual_seed(seed)
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        # What the weights' own initialisation leaves behind varies with the device; speed does not.
        return model.eval()


SHAPES = {
    shape.name: shape
    for shape in (
        Shape(
            "llama-0.25b",
            "llama",
            {
                "vocab_size": 32_000,
                "hidden_size": 1024,
                "intermediate_size": 2816,
                "num_hidden_layers": 16,
                "num_attention_heads": 16,
                "num_key_value_heads": 4,
            },
        ),
        Shape(
            "qwen-0.5b",
            "qwen2",
            {
                "vocab_size": 151_936,
                "hidden_size": 896,
                "intermediate_size": 4864,
                "num_hidden_layers": 24,
                "num_attention_heads": 14,
                "num_key_value_heads": 2,
                "tie_word_embeddings": True,
            },
        ),
        Shape(
            "llama-3.1-8b",
            "llama",
            {
                "vocab_size": 128_256,
                "hidden_size": 4096,
                "intermediate_size": 14_336,
                "num_hidden_layers": 32,
                "num_attention_heads": 32,
                "num_key_value_heads": 8,
                "rope_parameters": {"rope_theta": 500_000.0, "rope_type": "default"},
            },
        ),
        Shape(
            "tiny",
            "llama",
            {
                "vocab_size": 512,
                "hidden_size": 128,
                "intermediate_size": 384,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
            },
        ),
    )
}
"""By name; "tiny" is for tests and says nothing about speed."""


def shape_named(name: str) -> Shape:
    """A shape.

    Raises:
        InputError: there is none of this name.
    """
    if name not in SHAPES:
        raise InputError(f"{name!r} is no shape of the benchmark; choose among {sorted(SHAPES)}.")
    return SHAPES[name]


@dataclass(frozen=True, slots=True)
class Pretrained:
    """A trained model, timed over the same random tokens as a shape.

    Attributes:
        name: shipped, a local folder, or on the Hub.
    """

    name: str

    @property
    def head_dim(self) -> int:
        """Of keys and values."""
        config = self._config
        return int(
            getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        )

    @property
    def positions(self) -> int | None:
        """That it was made for, or None if it does not say."""
        return getattr(self._config, "max_position_embeddings", None)

    @property
    def _config(self) -> PreTrainedConfig:
        return load_config(self.name).get_text_config(decoder=True)

    def build(self, device: str, dtype: torch.dtype) -> PreTrainedModel:
        """The model, in evaluation mode, on its device and in its precision."""
        model, _ = load(self.name, None, dtype=dtype, device_map=device)
        return model.eval()


def timed(shape: str, model: str | None) -> Shape | Pretrained:
    """What is timed: the shape, unless a model is named.

    Raises:
        InputError: there is no shape of this name.
    """
    return shape_named(shape) if model is None else Pretrained(model)


def linears(model: PreTrainedModel) -> list[tuple[int, int]]:
    """(inputs, outputs) of every linear layer that each token of a prompt passes: no vocabulary."""
    body = model.base_model
    return [
        (module.in_features, module.out_features)
        for module in body.modules()
        if isinstance(module, torch.nn.Linear)
    ]


def token_bytes(model: PreTrainedModel) -> int:
    """Bytes of the keys and values of one token, all layers."""
    config = model.config.get_text_config(decoder=True)
    heads = config.num_key_value_heads
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    size = next(model.parameters()).element_size()
    return int(config.num_hidden_layers * 2 * heads * head * size)


def weight_bytes(model: PreTrainedModel) -> int:
    """Bytes of all weights, those that two layers share counted once."""
    return sum(parameter.nbytes for parameter in model.parameters())
