"""Loads the golden files of the released APE code."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from .cases import Case

FOLDER = Path(__file__).parent / "golden" / "ape_llama"
COUNT = 3


@dataclass(frozen=True, slots=True)
class Golden:
    """One stored run: its tokens, the released code's two numbers, and what that code gave.

    `logits` is (query + decoded, vocab) fp32; `greedy` the decoded tokens.
    """

    case: Case
    temperature: float
    scale: float
    greedy: list[int]
    logits: Tensor


@functools.cache
def _index() -> dict[str, Any]:
    index: dict[str, Any] = json.loads((FOLDER / "cases.json").read_text(encoding="utf-8"))
    return index


def load(number: int) -> Golden:
    """The stored run `number`, 0 to `COUNT` - 1."""
    item = _index()["cases"][number]
    return Golden(
        Case(item["prefix"], item["windows"], item["query"]),
        item["temperature"],
        item["scale"],
        item["greedy"],
        load_file(FOLDER / "logits.safetensors")[f"logits_{number}"],
    )


@functools.cache
def model() -> LlamaForCausalLM:
    """The stored Llama, fp32, in eval mode. Never change it."""
    options = _index()["config"]
    config = LlamaConfig(**options, bos_token_id=None, eos_token_id=None, pad_token_id=None)
    llama = LlamaForCausalLM(config)
    llama.load_state_dict(load_file(FOLDER / "model.safetensors"), strict=True)
    return llama.eval()
