"""Model types that can't be served are refused at load, by name and with a reason."""

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

STATE = "a recurrent state holds all tokens, not keys and values a token"
BIAS = "a bias by distance is added to the attention by the model itself"
CROSS = "an encoder reads the input, the decoder by cross-attention"
OWN = "the attention is written out in the model, not called by transformers' registry"
LATENT = "its cache holds something else than the keys and values of its attention"
AHEAD = "its attention looks ahead"
SHARED = "layers share keys and values"
CHUNKED = "attention ends at borders of fixed chunks of positions"

MLA: Mapping[str, Any] = {
    **COMMON,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
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


SHARING: Mapping[str, Any] = {
    **GQA,
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "head_dim": 16,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCAB,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
JETMOE: Mapping[str, Any] = {
    **MAMBA,
    "intermediate_size": INTERMEDIATE,
    "num_key_value_heads": 2,
    "kv_channels": 16,
    "num_local_experts": 4,
}
GPTJ: Mapping[str, Any] = {"n_embd": HIDDEN, "n_layer": 1, "n_head": HEADS, "rotary_dim": 8}
GPT_NEO: Mapping[str, Any] = {
    "hidden_size": HIDDEN,
    "num_layers": 2,
    "num_heads": HEADS,
    "attention_types": [[["global", "local"], 1]],
}
T5: Mapping[str, Any] = {
    "d_model": HIDDEN,
    "d_ff": INTERMEDIATE,
    "d_kv": 16,
    "num_layers": 1,
    "num_heads": HEADS,
}
LLAMA4: Mapping[str, Any] = {
    **GQA,
    "intermediate_size_mlp": INTERMEDIATE,
    "num_local_experts": 2,
    "head_dim": 16,
}
JAMBA: Mapping[str, Any] = {**GQA, "num_experts": 2, "attn_layer_period": 2, "attn_layer_offset": 1}
BLOOM: Mapping[str, Any] = {"hidden_size": HIDDEN, "n_layer": 1, "n_head": HEADS}
MPT: Mapping[str, Any] = {"d_model": HIDDEN, "n_layers": 1, "n_heads": HEADS}

REFUSED: tuple[Refused, ...] = (
    Refused(
        "moshi",
        "its config names a sliding window that its attention does not keep",
        {
            "hidden_size": HIDDEN,
            "num_hidden_layers": 2,
            "num_attention_heads": HEADS,
            "ffn_dim": 2 * INTERMEDIATE,
            "sliding_window": 8,
        },
    ),
    Refused("bloom", BIAS, BLOOM),
    Refused("mpt", BIAS, MPT),
    Refused("falcon", BIAS, {**COMMON, "alibi": True}),
    Refused("falcon", OWN, COMMON),
    Refused("gptj", OWN, GPTJ),
    Refused("codegen", OWN, GPTJ),
    Refused("gpt_neo", OWN, GPT_NEO),
    Refused("mamba", STATE, MAMBA),
    Refused("mamba2", STATE, {**MAMBA, "num_heads": 8, "head_dim": 16}),
    Refused("falcon_mamba", STATE, MAMBA),
    Refused("rwkv", STATE, {**MAMBA, "attention_hidden_size": HIDDEN}),
    Refused("recurrent_gemma", STATE, {**GQA, "lru_width": HIDDEN, "attention_window_size": 8}),
    Refused("jamba", STATE, JAMBA),
    Refused("bamba", STATE, {**GQA, "attn_layer_indices": [1]}),
    Refused("qwen3_next", STATE, {**GQA, **LINEAR, "head_dim": 16, "num_experts": 2}),
    Refused("minimax", STATE, {**GQA, **LINEAR, "num_local_experts": 2}),
    Refused("lfm2", STATE, {**GQA, "layer_types": ["conv", "full_attention"]}),
    Refused("t5", CROSS, T5, encoder_decoder=True),
    Refused("bart", CROSS, ENCODER_DECODER, encoder_decoder=True),
    Refused("bart", CROSS, ENCODER_DECODER),
    Refused("bert", AHEAD, COMMON),
    Refused("llama4_text", CHUNKED, LLAMA4),
    Refused("gemma4_text", SHARED, SHARING),
    Refused("deepseek_v2", LATENT, MLA),
    Refused("deepseek_v3", LATENT, MLA),
    Refused("minicpm3", LATENT, MLA),
    Refused("jetmoe", LATENT, JETMOE),
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
    assert len(message) < 400


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


@pytest.mark.parametrize("with_text", [True, False], ids=["text", "ids"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("changed", [untrained_control_tokens, sharp])
def test_a_model_that_reads_text_is_served_in_its_own_dtype(
    changed: Callable[[PreTrainedModel], None], seed: int, dtype: torch.dtype, with_text: bool
) -> None:
    model = small.build(seed)
    changed(model)
    tokenizer = small.tokenizer() if with_text else None
    WindowedLM.from_pretrained(model.to(dtype), tokenizer=tokenizer)


class Unplaced(LlamaForCausalLM):
    """Counts positions itself, whatever it is asked."""

    def forward(self, *args: Any, position_ids: Any = None, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


@pytest.mark.parametrize("changed", [None, sharp])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("with_text", [True, False], ids=["text", "ids"])
def test_a_refusal_names_the_number_the_limit_and_what_to_try(
    with_text: bool, dtype: torch.dtype, changed: Callable[[PreTrainedModel], None] | None
) -> None:
    model = small.build()
    if changed is not None:
        changed(model)
    model.__class__ = Unplaced
    tokenizer = small.tokenizer() if with_text else None
    with pytest.raises(UnsupportedModelError) as caught:
        WindowedLM.from_pretrained(model.to(dtype), tokenizer=tokenizer)
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
