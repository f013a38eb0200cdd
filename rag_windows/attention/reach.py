"""How far back each layer of a model sees."""

from __future__ import annotations

from transformers import PreTrainedConfig

from rag_windows.errors import UnsupportedModelError

FULL, SLIDING = "full_attention", "sliding_attention"


def layer_reach(config: PreTrainedConfig) -> tuple[int | None, ...]:
    """Per layer, the number of positions a token sees (itself included), or None for all.

    Args:
        config: of the text decoder. Where it lists no ``layer_types``, a ``sliding_window`` holds
            for every layer, as it does in transformers' own masks.

    Raises:
        UnsupportedModelError: a layer is neither full nor sliding attention.
    """
    layers = int(config.num_hidden_layers)
    window = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None) or [SLIDING if window else FULL] * layers
    other = sorted(set(types) - {FULL, SLIDING})
    if other:
        raise UnsupportedModelError(
            f"Model type '{config.model_type}' has layers of type {other}, which keep no keys and "
            "values per token that could be split into windows. Choose a model whose layers all "
            "use full or sliding attention."
        )
    return tuple(window if kind == SLIDING else None for kind in types)
