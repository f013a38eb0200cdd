"""What of vLLM's settings and models the connector can serve; the rest is refused by name."""

from __future__ import annotations

from typing import Any

from rag_windows.errors import InputError, UnsupportedModelError
from vllm_rag_windows.rotary import frequencies

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
"""Types whose attention is ordinary, and whose rotary embeddings pair the halves of a head."""

_ENGINE = "Use rag-windows' own engine."


def check_engine(config: Any) -> None:
    """Refuse a vLLM configuration under which answers would be wrong.

    Raises:
        InputError: an option; the message says which one to change.
        UnsupportedModelError: the model.
    """
    parallel, transfer = config.parallel_config, config.kv_transfer_config
    for name in (
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "data_parallel_size",
        "prefill_context_parallel_size",
        "decode_context_parallel_size",
    ):
        if getattr(parallel, name, 1) != 1:
            flag = name.replace("_", "-")
            raise InputError(f"Windows are supported in one worker alone. Start with --{flag}=1.")
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
    if cache not in ("auto", str(config.model_config.dtype).removeprefix("torch.")):
        raise InputError(f"kv_cache_dtype={cache!r} is not supported with windows. Use 'auto'.")
    check_model(config.model_config.hf_text_config)
    if config.model_config.is_hybrid or config.model_config.is_multimodal_model:
        raise UnsupportedModelError(f"Hybrid and multimodal models are not supported. {_ENGINE}")


def check_model(text: Any) -> None:
    """Refuse a model, by its text config, whose attention is not the ordinary one.

    Raises:
        UnsupportedModelError: the message names what it has, and what to use instead.
    """
    if text.model_type not in MODEL_TYPES:
        raise UnsupportedModelError(
            f"Models of the type {text.model_type!r} are not supported in vLLM, but "
            f"{list(MODEL_TYPES)}. {_ENGINE}"
        )
    kinds = set(getattr(text, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        raise UnsupportedModelError(
            f"Layers of the types {sorted(kinds)} are not supported. {_ENGINE}"
        )
    window = getattr(text, "sliding_window", None)
    if window is not None and getattr(text, "use_sliding_window", True):
        raise UnsupportedModelError(
            f"The model has a sliding window of {window} tokens, which would be measured from the "
            f"wrong positions. {_ENGINE}"
        )
    if getattr(text, "attn_logit_softcapping", None):
        raise UnsupportedModelError(
            f"The model caps its attention's logits, which does not go with moved keys. {_ENGINE}"
        )
    frequencies(text)
