"""How far back each layer of a model sees, and how far its rotary tables stay as they are."""

from __future__ import annotations

from collections.abc import Mapping

from transformers import PreTrainedConfig

from rag_windows.errors import LimitError, UnsupportedModelError

FULL, SLIDING = "full_attention", "sliding_attention"


def sliding_windows_of(config: PreTrainedConfig) -> tuple[int | None, ...]:
    """Per layer of a text decoder, how many positions a token sees, itself included; None for all.

    Where the config lists no ``layer_types``, a ``sliding_window`` holds for every layer, as it
    does in transformers' own masks.

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


def table_limit(config: PreTrainedConfig) -> int | None:
    """Positions up to which a text decoder's rotary tables stay as they are, or None for always.

    Past it, dynamic NTK and LongRoPE give the same token at the same position another key, so that
    windows encoded before no longer fit, and a forward pass changes the tables of every other one.
    Windows rarely come near: only the longest of them counts.
    """
    limits = []
    for table in _tables(config):
        kind = table.get("rope_type")
        if kind == "dynamic":
            limits.append(int(config.max_position_embeddings))
        elif kind == "longrope":
            original = table.get("original_max_position_embeddings") or getattr(
                config, "original_max_position_embeddings", None
            )
            limits.append(int(str(original or config.max_position_embeddings)))
    return min(limits, default=None)


def _tables(config: PreTrainedConfig) -> list[Mapping[str, object]]:
    """Rotary parameters, those of kinds of layers included."""
    parameters = getattr(config, "rope_parameters", None) or {}
    return [parameters, *(value for value in parameters.values() if isinstance(value, Mapping))]


def check_tables(limit: int | None, positions: int) -> None:
    """Refuse positions past the limit.

    Raises:
        LimitError: ``positions`` are more than ``limit``.
    """
    if limit is not None and positions > limit:
        raise LimitError(
            f"This request reaches {positions} positions, and from {limit} on the model's rotary "
            "tables change, so that encoded windows no longer fit. Set a smaller "
            "max_window_tokens, shorten the prefix or the query, or ask for fewer new tokens."
        )


def position_limit(config: PreTrainedConfig) -> int | None:
    """Positions that windows may use: those the model was made for while its keys stay the same.

    None where the config names no limit.
    """
    text = config.get_text_config(decoder=True)
    limits = (getattr(text, "max_position_embeddings", None), table_limit(text))
    return min((int(limit) for limit in limits if limit), default=None)


def prompt_limit(config: PreTrainedConfig) -> int | None:
    """Positions that a prompt without windows may use: all those the model was made for.

    They are more than `position_limit` where dynamic tables grow with the prompt (LongRoPE's config
    counts all positions already). None where the config names no limit.
    """
    text = config.get_text_config(decoder=True)
    limit = getattr(text, "max_position_embeddings", None)
    growing = [table for table in _tables(text) if table.get("rope_type") == "dynamic"]
    growth = min((float(str(table.get("factor", 1.0))) for table in growing), default=1.0)
    return None if not limit else int(limit * max(1.0, growth))
