"""Rotary position embeddings: moving keys that are already rotated (2104.09864, section 3.4)."""

from __future__ import annotations

from typing import Any

import torch

from rag_windows.errors import UnsupportedModelError

STATIC_TYPES = ("default", "linear", "llama3", "yarn")
"""Kinds whose frequencies do not depend on how long a text is."""


def frequencies(config: Any) -> torch.Tensor:
    """Angles a position, (rotated dims / 2,) float64, of a model's text config.

    Raises:
        UnsupportedModelError: the model has no rotary embeddings that are the same for all layers
            and all lengths.
    """
    rope = getattr(config, "rope_parameters", None)
    if not isinstance(rope, dict) or "rope_theta" not in rope:
        raise UnsupportedModelError(
            "Windows can be moved in models with one rotary position embedding for all layers, and "
            f"{config.model_type!r} has none such. Use rag-windows' own engine."
        )
    kind = rope.get("rope_type", "default")
    if kind not in STATIC_TYPES:
        raise UnsupportedModelError(
            f"Rotary embeddings of the type {kind!r} are not supported in vLLM, because keys of "
            f"one length can't be moved into a text of another. Supported: {list(STATIC_TYPES)}. "
            "Use rag-windows' own engine."
        )
    if kind == "default":
        width = head_width(config)
        width = int(width * rope.get("partial_rotary_factor", 1.0))
        return rope["rope_theta"] ** -(torch.arange(0, width, 2, dtype=torch.float64) / width)
    # The version that vLLM itself reads the config with.
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    return ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))[0].double()


def head_width(config: Any) -> int:
    """Numbers in one head's key."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def moved(keys: torch.Tensor, positions: int, angles: torch.Tensor) -> torch.Tensor:
    """Rotated keys as they would be so many positions further on.

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
