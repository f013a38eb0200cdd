"""What the released APE code gives, against the reference and the engine."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from rag_windows import APE

from . import dense, engine, tolerances
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


@pytest.mark.parametrize("number", range(COUNT))
def test_reference_meets_the_released_code(number: int) -> None:
    golden = load(number)
    rule = dense.Rule(golden.temperature, golden.temperature * golden.scale)
    one = golden.case
    rows = dense.logits(
        model(),
        (None, None),
        one.prefix,
        one.windows,
        [*one.query, *golden.greedy],
        rule,
    )
    assert tolerances.gap(rows, golden.logits) <= tolerances.GOLDEN


@pytest.mark.parametrize("number", range(COUNT))
def test_engine_prefill_and_decode(number: int) -> None:
    golden = load(number)
    one, greedy = golden.case, golden.greedy
    method = APE.from_released(golden.temperature, golden.scale)
    lm = engine.wrap(model())
    context = lm.encode_ids(one.prefix, one.windows, method=method)
    rows = lm.logits(context, [*one.query, *greedy])
    assert tolerances.gap(rows, golden.logits) <= tolerances.GOLDEN
    prefilled = lm.logits(context, one.query)
    assert tolerances.gap(prefilled, golden.logits[: len(one.query)]) <= tolerances.GOLDEN
    tokens, steps = engine.decode(lm, context, one.query, len(greedy))
    assert tokens == greedy
    last = len(one.query) - 1
    expected = golden.logits[last : last + len(tokens)]
    assert tolerances.gap(steps, expected) <= tolerances.GOLDEN
    assert torch.equal(steps.argmax(-1), torch.tensor(greedy))
