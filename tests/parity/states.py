"""Small models with seeded random weights whose windows can't share one attention."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from rag_windows import WindowedLM

from .zoo import COMMON, GQA, HEADS, HIDDEN, INTERMEDIATE, POSITIONS, VOCAB, WINDOW, draw

DELTA: Mapping[str, Any] = {
    **GQA,
    "num_hidden_layers": 4,
    "head_dim": 16,
    "layer_types": [*["linear_attention"] * 3, "full_attention"],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}
EXPERTS: Mapping[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
MAMBA: Mapping[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "mamba_d_conv": 4,
}
PURE: Mapping[str, Any] = {"vocab_size": VOCAB, "hidden_size": HIDDEN, "num_hidden_layers": 2}
MLA: Mapping[str, Any] = {
    **COMMON,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
}
ROUTED: Mapping[str, Any] = {
    **MLA,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
SHARING: Mapping[str, Any] = {
    **GQA,
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "head_dim": 16,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCAB,
}
CONVOLVED = ["conv", "conv", "full_attention", "conv"]
GPTJ: Mapping[str, Any] = {
    "vocab_size": VOCAB,
    "n_embd": HIDDEN,
    "n_layer": 2,
    "n_head": HEADS,
    "n_positions": POSITIONS,
    "rotary_dim": 8,
}

OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "qwen3_5_text": DELTA,
    "qwen3_next": {**DELTA, **EXPERTS, "shared_expert_intermediate_size": 32},
    "olmo_hybrid": DELTA,
    "lfm2": {**GQA, "num_hidden_layers": 4, "layer_types": CONVOLVED, "block_multiple_of": 16},
    "granitemoehybrid": {
        **GQA,
        **MAMBA,
        "num_hidden_layers": 3,
        "layer_types": ["mamba", "attention", "mamba"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 32,
    },
    "falcon_h1": {**GQA, **MAMBA, "mamba_d_ssm": 64, "mamba_n_heads": 4, "head_dim": 16},
    "jamba": {
        **GQA,
        "num_hidden_layers": 4,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "mamba_d_state": 8,
        "mamba_dt_rank": 8,
        "use_mamba_kernels": False,
    },
    "bamba": {**GQA, **MAMBA, "num_hidden_layers": 3, "attn_layer_indices": [1]},
    "nemotron_h": {
        **GQA,
        "num_hidden_layers": 4,
        "layers_block_type": ["mamba", "attention", "mlp", "mamba"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "ssm_state_size": 16,
        "n_groups": 1,
        "conv_kernel": 4,
        "head_dim": 16,
    },
    "mamba": {**PURE, "state_size": 8},
    "falcon_mamba": {**PURE, "state_size": 8},
    "mamba2": {**PURE, "num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 1},
    "deepseek_v2": ROUTED,
    "deepseek_v3": ROUTED,
    "deepseek_v32": {**ROUTED, "index_n_heads": 2, "index_head_dim": 16, "index_topk": 64},
    "minicpm3": MLA,
    "gemma3n_text": {
        **SHARING,
        "laurel_rank": 8,
        "altup_num_inputs": 2,
        "intermediate_size": [INTERMEDIATE] * 4,
        "activation_sparsity_pattern": [0.0] * 4,
    },
    "gemma4_text": SHARING,
    "llama4_text": {
        **GQA,
        "num_hidden_layers": 4,
        "head_dim": 16,
        "attention_chunk_size": 2 * WINDOW,
        "num_local_experts": 2,
        "intermediate_size_mlp": INTERMEDIATE,
        "interleave_moe_layer_step": 2,
    },
    "bloom": {"vocab_size": VOCAB, "hidden_size": HIDDEN, "n_layer": 2, "n_head": HEADS},
    "mpt": {
        "vocab_size": VOCAB,
        "d_model": HIDDEN,
        "n_layers": 2,
        "n_heads": HEADS,
        "max_seq_len": POSITIONS,
    },
    "falcon": COMMON,
    "falcon-alibi": {**COMMON, "alibi": True},
    "gptj": GPTJ,
    "codegen": GPTJ,
    "gpt_neo": {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "num_layers": 2,
        "num_heads": HEADS,
        "max_position_embeddings": POSITIONS,
        "attention_types": [[["global", "local"], 1]],
        "window_size": WINDOW,
    },
    "moshi": {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "num_hidden_layers": 2,
        "num_attention_heads": HEADS,
        "ffn_dim": 2 * INTERMEDIATE,
        "sliding_window": WINDOW,
    },
    "jetmoe": {**GQA, "kv_channels": 16, "num_local_experts": 4},
}
"""By name, which begins with the model type: a small configuration."""

BY_TOKEN = frozenset({"jamba", "mamba", "falcon_mamba"})
"""Models that take one token at a time behind a cache."""

ENDS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


def build(name: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A new model of this type, in evaluation mode."""
    config = CONFIG_MAPPING[name.partition("-")[0]](**{**ENDS, **OPTIONS[name]})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    draw(model, seed)
    return model.to(dtype)


@functools.cache
def shared(name: str) -> WindowedLM:
    """The engine on a model that tests share."""
    return WindowedLM.from_pretrained(build(name), tokenizer=None)
