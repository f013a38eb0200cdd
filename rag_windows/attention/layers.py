"""Which models the hook can serve, how far back their layers see, how far their tables go."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from rag_windows.errors import LimitError, RagWindowsError, UnsupportedModelError
from rag_windows.loading import input_device

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
    windows encoded before no longer fit. Only the longest window counts.
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
    """Refuse, with a LimitError, positions past the limit."""
    if limit is not None and positions > limit:
        raise LimitError(
            f"This request reaches {positions} positions, and from {limit} on the model's rotary "
            "tables change, so that encoded windows no longer fit. Set a smaller "
            "max_window_tokens, shorten the prefix or the query, or ask for fewer new tokens."
        )


def position_limit(config: PreTrainedConfig) -> int | None:
    """Positions that windows may use: those of the model while its keys stay; None for no limit."""
    text = config.get_text_config(decoder=True)
    limits = (getattr(text, "max_position_embeddings", None), table_limit(text))
    return min((int(limit) for limit in limits if limit), default=None)


def prompt_limit(config: PreTrainedConfig) -> int | None:
    """Positions that a prompt without windows may use, or None for no limit.

    They are more than `position_limit` where dynamic tables grow with the prompt (LongRoPE's config
    counts all positions already).
    """
    text = config.get_text_config(decoder=True)
    limit = getattr(text, "max_position_embeddings", None)
    growing = [table for table in _tables(text) if table.get("rope_type") == "dynamic"]
    growth = min((float(str(table.get("factor", 1.0))) for table in growing), default=1.0)
    return None if not limit else int(limit * max(1.0, growth))


EXACT_TOLERANCE = 1e-3
ROUGH_TOLERANCE = 0.05
"""Relative error allowed between windows and ordinary attention on the probe, fp32 and below."""

DYNAMIC_TOLERANCE = 0.2
"""The same where PyTorch's ``quantize_dynamic`` rounds each module's inputs by the largest of those
that are computed together, so that every split prompt is rounded otherwise."""


def check_config(model: PreTrainedModel) -> None:
    """Refuse what the config already tells, naming the model type and the reason."""
    whole = model.config
    config = whole.get_text_config(decoder=True)
    kind = whole.model_type
    if whole.is_encoder_decoder:
        raise _refusal(kind, "it is an encoder-decoder, which reads its input by cross-attention")
    if not model.can_generate():
        raise _refusal(kind, "it has no language-model head; load it as AutoModelForCausalLM")
    if kind in ("bloom", "mpt") or getattr(config, "alibi", False):
        raise _refusal(kind, "its ALiBi bias is added to the attention by the model itself")
    if kind == "moshi":
        raise _refusal(kind, "its config names a sliding window that its attention does not keep")
    ahead = any(
        getattr(module, "is_causal", None) is False
        for module in model.modules()
        if hasattr(module, "layer_idx")
    )
    if ahead or getattr(config, "use_bidirectional_attention", None):
        raise _refusal(kind, "its attention looks ahead, so a window has no fixed keys")
    if getattr(config, "num_kv_shared_layers", 0) or any(
        getattr(config, "kv_sharing_modes", None) or ()
    ):
        raise _refusal(kind, "its layers share keys and values with each other")
    if getattr(config, "attention_chunk_size", None):
        raise _refusal(kind, "its chunked attention cuts the positions that windows share")
    sliding_windows_of(config)


Split = Callable[[Sequence[int], Sequence[int], Sequence[int]], torch.Tensor]
"""Logits (vocabulary,), fp32, of a query's last token, from prefix, window and query."""


def check_attention(model: PreTrainedModel, split: Split) -> None:
    """Compare a split prompt with the plain model on a few tokens.

    A model whose attention ignores the registry, its position ids or the windows would answer
    wrongly without a word, and so would one whose cache holds something else than the keys and
    values of its attention.

    Raises:
        UnsupportedModelError: naming the model type and what differed.
    """
    config = model.config.get_text_config(decoder=True)
    kind = model.config.model_type
    ids = [1 + i % max(1, config.vocab_size - 2) for i in range(6)]
    training = [module for module in model.modules() if module.training]
    try:
        with torch.no_grad():
            found = split(ids[:2], ids[2:4], ids[4:])
            model.eval()
            row = torch.tensor([ids], device=input_device(model))
            plain = model(row).logits[0, -1].float()
    except UnsupportedModelError as error:
        raise _refusal(kind, str(error)) from error
    except RagWindowsError:
        raise
    except KeyError as error:
        reason = "its layers do not call the registered attention function"
        raise _refusal(kind, reason) from error
    except (RuntimeError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise _refusal(
            kind, f"its own attention code can't run beside windows ({error})"
        ) from error
    finally:
        # Not by train(), which would set all the modules inside to one and the same.
        for module in training:
            module.training = True
    difference = (found - plain).norm() / plain.norm().clamp_min(1e-6)
    if not difference <= _tolerance(model):
        raise _refusal(
            kind,
            f"one window gives other logits than ordinary attention (off by {difference:.1%})",
        )


def _tolerance(model: PreTrainedModel) -> float:
    kinds = {type(module).__module__ for module in model.modules()}
    if any(kind.startswith("torch.ao.nn.quantized.dynamic") for kind in kinds):
        return DYNAMIC_TOLERANCE
    exact = model.dtype in (torch.float32, torch.float64)
    exact = exact and not getattr(model, "is_quantized", False)
    return EXACT_TOLERANCE if exact else ROUGH_TOLERANCE


def _refusal(kind: str, reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"Model type '{kind}' can't read parallel windows: {reason}. Choose a decoder-only model "
        "with rotary or learned positions, such as Llama, Qwen, Mistral or Gemma."
    )
