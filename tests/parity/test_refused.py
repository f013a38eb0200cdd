"""Model types that can't be served are refused at load, by name and with a reason."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaModel, PreTrainedModel

from rag_windows import UnsupportedModelError

from . import engine
from .architectures import GQA
from .refused import REFUSED, Refused, build
from .weights import draw


def refusal(model: PreTrainedModel) -> str:
    with pytest.raises(UnsupportedModelError) as caught:
        engine.wrap(model)
    return str(caught.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("entry", REFUSED, ids=lambda entry: f"{entry.model_type}: {entry.why}")
def test_refused_by_name(entry: Refused, dtype: torch.dtype) -> None:
    model = build(entry)
    draw(model, 1)
    message = refusal(model.to(dtype))
    assert message.count(f"'{model.config.model_type}'") == 1
    assert ":" in message or "has layers" in message
    assert len(message) < 400


def test_a_model_without_a_head() -> None:
    assert "language-model head" in refusal(LlamaModel(LlamaConfig(**GQA)))
