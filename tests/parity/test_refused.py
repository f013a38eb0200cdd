"""Model types that can't be served are refused at load, by name and with a reason.

Those whose windows can't share one attention, but read in rows, are in `states`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    PreTrainedModel,
)

from rag_windows import UnsupportedModelError, WindowedLM
from tests.rag_windows import small

from . import engine
from .zoo import COMMON, GQA, HEADS, HIDDEN, INTERMEDIATE, VOCAB, draw

STATE = "its state is in a place of its own, not in a cache of transformers"
CROSS = "an encoder reads the input, the decoder by cross-attention"
AHEAD = "its attention looks ahead"

ENCODER_DECODER: Mapping[str, Any] = {
    "d_model": HIDDEN,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": HEADS,
    "decoder_attention_heads": HEADS,
    "encoder_ffn_dim": INTERMEDIATE,
    "decoder_ffn_dim": INTERMEDIATE,
}
MAMBA: Mapping[str, Any] = {"hidden_size": HIDDEN, "num_hidden_layers": 2}
LINEAR: Mapping[str, Any] = {"layer_types": ["linear_attention", "full_attention"]}


@dataclass(frozen=True, slots=True)
class Refused:
    """A model type that is refused, a small configuration of it, and why it can't be served."""

    model_type: str
    why: str
    options: Mapping[str, Any]
    encoder_decoder: bool = False


T5: Mapping[str, Any] = {
    "d_model": HIDDEN,
    "d_ff": INTERMEDIATE,
    "d_kv": 16,
    "num_layers": 1,
    "num_heads": HEADS,
}
REFUSED: tuple[Refused, ...] = (
    Refused("rwkv", STATE, {**MAMBA, "attention_hidden_size": HIDDEN}),
    Refused("recurrent_gemma", STATE, {**GQA, "num_hidden_layers": 3, "lru_width": HIDDEN}),
    Refused("minimax", STATE, {**GQA, **LINEAR, "num_local_experts": 2}),
    Refused("t5", CROSS, T5, encoder_decoder=True),
    Refused("bart", CROSS, ENCODER_DECODER, encoder_decoder=True),
    Refused("bart", CROSS, ENCODER_DECODER),
    Refused("bert", AHEAD, COMMON),
)


def build(entry: Refused) -> PreTrainedModel:
    """A new model of `entry`, fp32, in eval mode."""
    config = CONFIG_MAPPING[entry.model_type](**{"vocab_size": VOCAB, **entry.options})
    loader = AutoModelForSeq2SeqLM if entry.encoder_decoder else AutoModelForCausalLM
    return loader.from_config(config).eval()


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
    assert len(message) < 420


def test_a_model_without_a_head() -> None:
    assert "language-model head" in refusal(LlamaModel(LlamaConfig(**GQA)))


def untrained_control_tokens(model: PreTrainedModel) -> None:
    """Rows of the embedding that no text reads hold no numbers."""
    with torch.no_grad():
        model.get_input_embeddings().weight[: len(small.SPECIAL)] = torch.nan


def sharp(model: PreTrainedModel) -> None:
    """Attention that one key takes whole: which one, low precision leaves to chance."""
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight *= 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("changed", [untrained_control_tokens, sharp])
def test_a_model_that_reads_text_is_served_in_its_own_dtype(
    changed: Callable[[PreTrainedModel], None], dtype: torch.dtype
) -> None:
    model = small.build()
    changed(model)
    WindowedLM.from_pretrained(model.to(dtype), tokenizer=small.tokenizer())


class Unplaced(LlamaForCausalLM):
    """Counts positions itself, whatever it is asked."""

    def forward(self, *args: Any, position_ids: Any = None, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_refusal_names_the_number_the_limit_and_what_to_try(dtype: torch.dtype) -> None:
    model = small.build()
    model.__class__ = Unplaced
    with pytest.raises(UnsupportedModelError) as caught:
        WindowedLM.from_pretrained(model.to(dtype), tokenizer=small.tokenizer())
    message = str(caught.value)
    off, limit, own = (float(one) for one in re.findall(r"([\d.]+)%", message))
    assert off > limit >= own
    assert ("dtype='float32'" in message) == (dtype != torch.float32)
    assert len(message) < 400


def test_a_model_that_overflows_is_refused_for_that() -> None:
    model = small.build()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.down_proj.weight *= 1e5
    WindowedLM.from_pretrained(model, tokenizer=small.tokenizer())
    with pytest.raises(UnsupportedModelError, match=r"NaN or infinity .* float16\. Load it with"):
        WindowedLM.from_pretrained(model.half(), tokenizer=small.tokenizer())
