"""The wrapped model, used without the engine, is bit for bit what it was."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel

from rag_windows import LimitError, WindowedLM

from . import engine, tolerances, zoo
from .cases import CASES, RULES, case
from .dense import Rule
from .zoo import GQA, Entry

NAMES = ["llama", "mistral-sliding", "qwen2-sliding", "gemma2", "gpt2", "opt", "gpt_oss"]


class BoomError(Exception):
    """Raised by these tests in the middle of the engine."""


class Bomb(LogitsProcessor):
    """Fails at the second decoded step."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 2:
            raise BoomError
        return scores


def snapshot(model: PreTrainedModel) -> dict[str, Any]:
    """What the plain model does and holds."""
    tokens = torch.tensor([CASES["ragged"].flat])
    torch.manual_seed(3)
    with torch.no_grad():
        return {
            "implementation": model.config._attn_implementation,
            "config": model.config.to_json_string(),
            "generation config": model.generation_config.to_json_string(),
            "hooks": sum(
                len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()
            ),
            "forward": model(tokens).logits,
            "generated": model.generate(tokens, max_new_tokens=3, do_sample=False),
            "sampled": model.generate(tokens, max_new_tokens=3, do_sample=True),
            **{name: value.clone() for name, value in model.state_dict().items()},
        }


def same(before: dict[str, Any], after: dict[str, Any]) -> None:
    assert before.keys() == after.keys()
    for name, value in before.items():
        equal = torch.equal if isinstance(value, Tensor) else operator.eq
        assert equal(after[name], value), name


def use(lm: WindowedLM, **options: Any) -> list[int]:
    one = CASES["ragged"]
    context = lm.encode_ids(one.prefix, one.windows, method=engine.method(RULES["as used"]))
    lm.logits(context, one.query)
    return lm.generate_ids(context, one.query, max_new_tokens=4, **options)


def explode(model: PreTrainedModel) -> None:
    """Make the last layer fail once."""
    layers = [m for m in model.modules() if isinstance(m, torch.nn.ModuleList)]
    last = max(layers, key=lambda m: sum(p.numel() for p in m.parameters()))[-1]

    def fail(*_: object) -> None:
        handle.remove()
        raise BoomError

    handle = last.register_forward_pre_hook(fail)


def fail_in_processor(lm: WindowedLM) -> None:
    use(lm, logits_processor=LogitsProcessorList([Bomb()]))


def fail_while_encoding(lm: WindowedLM) -> None:
    explode(lm.model)
    use(lm)


def fail_while_reading(lm: WindowedLM) -> None:
    one = CASES["ragged"]
    context = lm.encode_ids(one.prefix, one.windows)
    explode(lm.model)
    lm.logits(context, one.query)


@pytest.mark.parametrize("name", NAMES)
def test_after_use(name: str) -> None:
    model = zoo.build(zoo.BY_NAME[name])
    before = snapshot(model)
    lm = engine.wrap(model)
    same(before, snapshot(model))
    use(lm)
    same(before, snapshot(model))
    assert lm.model is model


@pytest.mark.parametrize("name", ["llama", "qwen2-sliding", "gemma2", "gpt_oss"])
@pytest.mark.parametrize("fail", [fail_in_processor, fail_while_encoding, fail_while_reading])
def test_after_an_exception(name: str, fail: Callable[[WindowedLM], None]) -> None:
    model = zoo.build(zoo.BY_NAME[name])
    before = snapshot(model)
    lm = engine.wrap(model)
    tokens = use(lm)
    with pytest.raises(BoomError):
        fail(lm)
    same(before, snapshot(model))
    assert use(lm) == tokens


def test_plain_use_inside_a_generation() -> None:
    """A logits processor that calls the plain model gets the plain model."""
    model = zoo.build(zoo.BY_NAME["llama"])
    tokens = torch.tensor([CASES["ragged"].flat])
    with torch.no_grad():
        before = model(tokens).logits
    seen: list[Tensor] = []

    class Asks(LogitsProcessor):
        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            seen.append(model(tokens).logits)
            return scores

    use(engine.wrap(model), logits_processor=LogitsProcessorList([Asks()]))
    assert len(seen) == 4
    assert all(tolerances.gap(rows, before) == 0.0 for rows in seen)


GROWING = {
    "dynamic": Entry(
        "llama-dynamic",
        {
            **GQA,
            "max_position_embeddings": 32,
            "rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4},
        },
    ),
    "longrope": Entry(
        "phi3-longrope",
        {
            **GQA,
            "sliding_window": None,
            "original_max_position_embeddings": 32,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "short_factor": [1.0] * 8,
                "long_factor": [2.0 + i for i in range(8)],
            },
        },
    ),
}
SHORT = torch.tensor([zoo.ids(10, 1)])
LONG = torch.tensor([zoo.ids(60, 2)])


@pytest.mark.parametrize("kind", GROWING)
@torch.no_grad()
def test_plain_model_after_a_long_prompt_of_ours(kind: str) -> None:
    model = zoo.build(GROWING[kind])
    before = model(SHORT).logits
    # To refuse what makes the tables grow is an answer too.
    with contextlib.suppress(LimitError):
        engine.rows(engine.wrap(model), case(5, (40, 3), 9), Rule())
    assert torch.equal(model(SHORT).logits, before)
    assert torch.equal(model(LONG).logits, zoo.build(GROWING[kind])(LONG).logits)


@pytest.mark.parametrize("kind", GROWING)
@torch.no_grad()
def test_ours_after_a_long_prompt_of_the_plain_model(kind: str) -> None:
    model, one = zoo.build(GROWING[kind]), case(5, (12, 3), 6)
    lm = engine.wrap(model)
    before = engine.rows(lm, one, Rule())
    model(LONG)
    assert tolerances.gap(engine.rows(lm, one, Rule()), before) == 0.0
