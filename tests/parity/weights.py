"""Seeded random weights that make attention matter: far from uniform, logits near unit scale."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

# Layers whose outputs are (also) queries and keys: a gain here takes attention away from uniform.
MAKES_LOGITS = frozenset({"q_proj", "k_proj", "qkv_proj", "c_attn", "query_key_value"})


def fan_in(module: nn.Module, weight: Tensor) -> int:
    """Number of inputs that one output of `weight` sums over."""
    if isinstance(module, Conv1D):
        return weight.shape[0]
    if weight.ndim == 3:
        # Expert weights are (expert, in, out) in one family and (expert, out, in) in another.
        return min(weight.shape[1:])
    return weight.shape[-1]


def draw(model: PreTrainedModel, seed: int) -> None:
    """Fill every parameter of `model` with seeded noise, in place."""
    generator = torch.Generator().manual_seed(seed)
    tied = model.config.get_text_config().tie_word_embeddings
    embeddings = model.get_input_embeddings().weight
    for path, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
            if parameter is embeddings:
                noise *= parameter.shape[-1] ** -0.5 if tied else 1.0
            elif isinstance(module, nn.Embedding):
                noise *= 0.5
            elif parameter.ndim == 1:
                # Norm weights stay near what they were (1, or 0 where the model adds 1).
                noise = parameter.detach().float() + 0.2 * noise
            else:
                gain = 1.2 if path.rsplit(".", 1)[-1] in MAKES_LOGITS else 1.0
                noise *= gain * fan_in(module, parameter) ** -0.5
            parameter.data.copy_(noise)


def strong_sinks(model: PreTrainedModel) -> None:
    """Let attention sinks take a share that a wrong merge would show."""
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            parameter.data.normal_(1.0, 1.0)


def calm(model: PreTrainedModel) -> None:
    """Gemma 4 does not scale its logits; without this a single key takes all the attention."""
    for name, parameter in model.named_parameters():
        if name.endswith("q_norm.weight"):
            parameter.data.mul_(0.25)
