"""Builds the small models of `architectures` with seeded random weights."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from .architectures import ENTRIES, VOCAB, Entry, draw

BY_NAME: Mapping[str, Entry] = {entry.name: entry for entry in ENTRIES}
NAMES: tuple[str, ...] = tuple(BY_NAME)


def build(entry: Entry, *, dtype: torch.dtype = torch.float32, seed: int = 0) -> PreTrainedModel:
    """A new model of `entry` in `dtype`, in eval mode, with its family's default attention.

    The drawn numbers are the same in every dtype (rounded to it).
    """
    config = CONFIG_MAPPING[entry.model_type](**entry.options)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    draw(model, seed + 1)
    if entry.adjust is not None:
        with torch.random.fork_rng():
            torch.manual_seed(seed + 2)
            entry.adjust(model)
    model.tie_weights()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    return model.to(dtype).eval()


@functools.cache
def shared(name: str) -> PreTrainedModel:
    """The fp32 model of the entry `name`, built once a process. Never change it."""
    return build(BY_NAME[name])


def ids(length: int, seed: int) -> list[int]:
    """`length` seeded token ids."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (length,), generator=generator).tolist()
