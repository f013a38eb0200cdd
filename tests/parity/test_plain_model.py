"""The wrapped model, used without the engine, is bit for bit what it was."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel

from rag_windows import WindowedLM

from . import engine, tolerances, zoo
from .cases import CASES, RULES

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
