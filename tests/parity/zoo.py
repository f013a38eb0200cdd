"""Small models with seeded random weights: every architecture that is served.

Each entry states by hand what its layers may see (`sliding`, one value a layer), so that the dense
reference does not have to ask the model or the engine.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel
from transformers.pytorch_utils import Conv1D

VOCAB = 200
HIDDEN = 64
HEADS = 4
KV_HEADS = 2
INTERMEDIATE = 96
POSITIONS = 256
WINDOW = 8

COMMON: Mapping[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "max_position_embeddings": POSITIONS,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
GQA: Mapping[str, Any] = {**COMMON, "num_key_value_heads": KV_HEADS}
GEMMA: Mapping[str, Any] = {**GQA, "head_dim": 16, "query_pre_attn_scalar": 16}
GPT2: Mapping[str, Any] = {
    "vocab_size": VOCAB,
    "n_embd": HIDDEN,
    "n_layer": 2,
    "n_head": HEADS,
    "n_positions": POSITIONS,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
MIXED_REACH = (WINDOW, None, WINDOW)
SLIDING: Mapping[str, Any] = {
    "num_hidden_layers": 3,
    "sliding_window": WINDOW,
    "layer_types": MIXED,
}


@dataclass(frozen=True, slots=True)
class Entry:
    """One random model: its configuration and what each of its layers may see.

    Its name begins with its model type. `sliding` has one value a layer: the reach in positions,
    None for full attention. `mask_by_type` says that the model takes a dict of 4D masks, one a
    layer type.
    """

    name: str
    options: Mapping[str, Any]
    sliding: tuple[int | None, ...] = (None, None)
    mask_by_type: bool = False
    adjust: Callable[[PreTrainedModel], None] | None = field(default=None, compare=False)

    @property
    def model_type(self) -> str:
        """As transformers calls it."""
        return self.name.partition("-")[0]


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


ENTRIES: tuple[Entry, ...] = (
    Entry("llama", GQA),
    Entry("llama-mha", COMMON),
    Entry("mistral", {**GQA, "sliding_window": None}),
    Entry("mistral-sliding", {**GQA, "sliding_window": WINDOW}, (WINDOW, WINDOW)),
    Entry("qwen2", GQA, mask_by_type=True),
    Entry(
        "qwen2-sliding",
        {**GQA, "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
        (None, WINDOW),
        mask_by_type=True,
    ),
    Entry("qwen3", {**GQA, "head_dim": 16}, mask_by_type=True),
    Entry("gemma", {**GQA, "num_key_value_heads": 1, "head_dim": 16}),
    Entry(
        "gemma2",
        {
            **GEMMA,
            **SLIDING,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
        MIXED_REACH,
        mask_by_type=True,
    ),
    Entry(
        "gemma3_text",
        {**GEMMA, "layer_types": ["full_attention", "full_attention"]},
        mask_by_type=True,
    ),
    Entry(
        "gemma3_text-sliding",
        {**GEMMA, **SLIDING},
        MIXED_REACH,
        mask_by_type=True,
    ),
    Entry(
        "gemma4_text",
        {
            **GQA,
            **SLIDING,
            "layer_types": ["sliding_attention", "full_attention", "full_attention"],
            "head_dim": 16,
            "global_head_dim": 32,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "num_kv_shared_layers": 0,
            "hidden_size_per_layer_input": 32,
            "vocab_size_per_layer_input": VOCAB,
        },
        (WINDOW, None, None),
        mask_by_type=True,
        adjust=calm,
    ),
    Entry("phi", GQA),
    Entry("phi3", {**GQA, "sliding_window": None}),
    Entry("phi3-sliding", {**GQA, "sliding_window": WINDOW}, (WINDOW, WINDOW)),
    Entry("olmo", {**GQA, "clip_qkv": 2.0}),
    Entry("olmo2", GQA),
    Entry(
        "granite",
        {
            **GQA,
            "embedding_multiplier": 2.0,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.3,
            "logits_scaling": 1.5,
        },
    ),
    Entry("starcoder2", {**GQA, "sliding_window": None}),
    Entry("starcoder2-sliding", {**GQA, "sliding_window": WINDOW}, (WINDOW, WINDOW)),
    Entry("stablelm", {**GQA, "use_qkv_bias": True, "qk_layernorm": True}),
    Entry("cohere", {**GQA, "logit_scale": 1.0, "use_qk_norm": True}),
    Entry("cohere2", {**GQA, **SLIDING, "logit_scale": 1.0}, MIXED_REACH, mask_by_type=True),
    Entry("gpt_neox", COMMON),
    Entry("gpt2", GPT2),
    Entry("gpt2-scaled", {**GPT2, "scale_attn_by_inverse_layer_idx": True, "n_inner": 80}),
    Entry("opt", {**COMMON, "ffn_dim": INTERMEDIATE, "word_embed_proj_dim": HIDDEN}),
    Entry(
        "gpt_oss",
        {
            **GQA,
            **SLIDING,
            "head_dim": 16,
            # The family's YaRN factor belongs to this length.
            "max_position_embeddings": 131072,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
        MIXED_REACH,
        mask_by_type=True,
        adjust=strong_sinks,
    ),
    Entry(
        "mixtral",
        {**GQA, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    ),
    Entry(
        "qwen3_moe",
        {
            **GQA,
            "head_dim": 16,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
        },
    ),
    Entry(
        "smollm3",
        {**GQA, "num_hidden_layers": 3, "no_rope_layers": [1, 0, 1]},
        (None, None, None),
        mask_by_type=True,
    ),
    Entry("olmo3", {**GQA, **SLIDING}, MIXED_REACH, mask_by_type=True),
    Entry("glm4", {**GQA, "head_dim": 16}),
    Entry("gpt_bigcode", GPT2),
    Entry(
        "gemma3",
        {
            "text_config": {**GEMMA, **SLIDING, "model_type": "gemma3_text"},
            "vision_config": {
                "model_type": "siglip_vision_model",
                "hidden_size": 32,
                "intermediate_size": 32,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "image_size": 28,
                "patch_size": 14,
            },
            "mm_tokens_per_image": 4,
        },
        MIXED_REACH,
        mask_by_type=True,
    ),
)

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
