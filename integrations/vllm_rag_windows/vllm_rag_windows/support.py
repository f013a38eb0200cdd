"""Which settings and models of vLLM can be served, and how a model's keys are moved."""

from __future__ import annotations

from typing import Any

import torch

from rag_windows.errors import InputError, UnsupportedModelError

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
"""Types whose attention is ordinary, and whose rotary embeddings pair the halves of a head."""

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Kinds of rotary embeddings whose frequencies do not depend on how long a text is."""

_PARALLEL = tuple(
    f"{kind}_parallel_size"
    for kind in ("tensor", "pipeline", "data", "prefill_context", "decode_context")
)
_ENGINE = "Use rag-windows' own engine."


def check_engine(config: Any) -> None:
    """Refuse a vLLM configuration under which answers would be wrong.

    Raises:
        InputError: an option; the message says which one to change.
        UnsupportedModelError: the model.
    """
    for name in _PARALLEL:
        if getattr(config.parallel_config, name, 1) != 1:
            flag = name.replace("_", "-")
            raise InputError(f"Windows are supported in one worker alone. Start with --{flag}=1.")
    transfer, model = config.kv_transfer_config, config.model_config
    if transfer.kv_role != "kv_both":
        raise InputError(
            f"kv_role must be 'kv_both', not {transfer.kv_role!r}: it saves and loads."
        )
    if transfer.kv_load_failure_policy != "fail":
        raise InputError(
            "kv_load_failure_policy must be 'fail'. Recomputed, windows would be read one after "
            "the other, and nobody would be told."
        )
    if config.speculative_config is not None:
        raise InputError("Windows are not supported with speculative decoding. Leave it out.")
    if config.lora_config is not None:
        raise InputError("Windows are not supported with LoRA. Merge the adapter into the model.")
    cache = config.cache_config.cache_dtype
    if cache not in ("auto", str(model.dtype).removeprefix("torch.")):
        raise InputError(f"kv_cache_dtype={cache!r} is not supported with windows. Use 'auto'.")
    if model.is_hybrid or model.is_multimodal_model:
        raise UnsupportedModelError(f"Hybrid and multimodal models are not supported. {_ENGINE}")
    check_model(model.hf_text_config)


def check_model(text: Any) -> None:
    """Refuse a model, by its text config, whose attention is not the ordinary one.

    Raises:
        UnsupportedModelError: the message names what it has, and what to use instead.
    """
    kinds = set(getattr(text, "layer_types", None) or ()) - {"full_attention"}
    sliding = getattr(text, "sliding_window", None) and getattr(text, "use_sliding_window", True)
    for found, name in (
        (kinds, f"layers of the types {sorted(kinds)}"),
        (sliding, "a sliding window, which would be measured from the wrong positions"),
        (getattr(text, "attn_logit_softcapping", None), "soft caps on its attention's logits"),
        (text.model_type not in MODEL_TYPES, f"a type other than {list(MODEL_TYPES)}"),
    ):
        if found:
            raise UnsupportedModelError(
                f"The model ({text.model_type!r}) is not supported in vLLM: it has {name}. "
                f"{_ENGINE}"
            )
    frequencies(text)


def frequencies(config: Any) -> torch.Tensor:
    """Angles a position, (rotated dims / 2,) float64, of a model's text config.

    Raises:
        UnsupportedModelError: the model has no rotary embeddings that are the same for all layers
            and all lengths.
    """
    rope: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    kind = rope.get("rope_type", "default") if "rope_theta" in rope else None
    if kind not in ROPE_TYPES:
        raise UnsupportedModelError(
            f"Keys of {config.model_type!r} can't be moved in vLLM. It needs rotary embeddings of "
            f"one type for all layers and lengths, {list(ROPE_TYPES)}, not {kind!r}. {_ENGINE}"
        )
    if kind == "default":
        whole = getattr(config, "head_dim", 0) or config.hidden_size // config.num_attention_heads
        width = int(whole * rope.get("partial_rotary_factor", 1.0))
        return rope["rope_theta"] ** -(torch.arange(0, width, 2, dtype=torch.float64) / width)
    # The version that vLLM itself reads the config with.
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    return ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))[0].double()


def moved(keys: torch.Tensor, positions: int, angles: torch.Tensor) -> torch.Tensor:
    """Rotated keys as they would be so many positions further on (2104.09864, section 3.4).

    Args:
        keys: (..., head dim), the two halves of the rotated part paired, as in Llama.
        positions: may be 0 or below.
        angles: see `frequencies`.

    Returns:
        The same shape, fp32.
    """
    turned = (positions * angles).to(keys.device)
    cos, sin = turned.cos().float(), turned.sin().float()
    half = len(angles)
    first, second, rest = keys.float().split([half, half, keys.shape[-1] - 2 * half], dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)
