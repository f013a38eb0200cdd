"""Which models the hook can serve, how far back their layers see, how far their tables go."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence

import torch
from transformers import DynamicCache, GenerationMixin, PreTrainedConfig, PreTrainedModel

from rag_windows.errors import LimitError, RagWindowsError, UnsupportedModelError
from rag_windows.loading import input_device

_INPUTS = inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
CACHE = "cache" if "cache" in _INPUTS else "past_key_values"
"""What the installed transformers calls a KV cache among a model's inputs and outputs.

From 5.24 on it is ``cache``, and the name before warns where it is still taken.
"""

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
        reason = f"it has layers of type {other}, which keep no keys and values of each token"
        raise refusal(config.model_type, reason)
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

NOISE_FACTOR = 3.0
"""How many times its own rounding a model may be off by, where that is more."""

LARGEST_TOLERANCE = 0.5
"""Relative error above which a model is refused, whatever its rounding."""

_PROBE = (
    "The old bridge over the river was closed for most of last year.",
    " In spring a new bridge was built beside it, and many people use it.",
    " When was the new bridge over the river built, and who uses it?",
)
_PROBE_TOKENS = 8
"""Of each part: some sliding layers and some rounding need more than a few."""


def probe_ids(
    vocabulary: int, encode: Callable[[str], Sequence[int]] | None = None
) -> list[list[int]]:
    """Token ids of a prefix, a window and a query: ordinary text.

    Args:
        vocabulary: number of token ids of the model.
        encode: a tokenizer's ids of a text, without special tokens. Without one, the ids are from
            the part of a vocabulary that holds common words in most tokenizers: behind control
            tokens and bytes, before rare words and what was added later.
    """
    texts = [list(encode(text))[:_PROBE_TOKENS] for text in _PROBE] if encode else []
    if texts and all(texts) and max(map(max, texts)) < vocabulary:
        return texts
    first = vocabulary // 8
    ids = [first + i * first // (3 * _PROBE_TOKENS) for i in range(3 * _PROBE_TOKENS)]
    return [ids[i : i + _PROBE_TOKENS] for i in range(0, len(ids), _PROBE_TOKENS)]


def check_kind(model: PreTrainedModel) -> None:
    """Refuse models of which nothing that was encoded could be read again, with the reason."""
    whole = model.config
    config, kind = whole.get_text_config(decoder=True), whole.model_type
    if whole.is_encoder_decoder:
        raise refusal(kind, "it is an encoder-decoder, which reads its input by cross-attention")
    if not model.can_generate():
        raise refusal(kind, "it has no language-model head; load it as AutoModelForCausalLM")
    ahead = any(
        getattr(module, "is_causal", None) is False
        for module in model.modules()
        if hasattr(module, "layer_idx")
    )
    if ahead or getattr(config, "use_bidirectional_attention", None):
        raise refusal(kind, "its attention looks ahead, so a window has no fixed keys")


def check_config(model: PreTrainedModel) -> None:
    """Refuse models that the config shows to share no attention between windows, with the reason.

    Raises:
        UnsupportedModelError: naming model type and reason.
    """
    whole = model.config
    config, kind = whole.get_text_config(decoder=True), whole.model_type
    if kind in ("bloom", "mpt") or getattr(config, "alibi", False):
        raise refusal(kind, "its ALiBi bias is added to the attention by the model itself")
    if kind == "moshi":
        raise refusal(kind, "its config names a sliding window that its attention does not keep")
    if getattr(config, "num_kv_shared_layers", 0) or any(
        getattr(config, "kv_sharing_modes", None) or ()
    ):
        raise refusal(kind, "its layers share keys and values with each other")
    if getattr(config, "kv_lora_rank", None):
        raise refusal(kind, "its cache holds something other than the keys and values of attention")
    if getattr(config, "attention_chunk_size", None):
        raise refusal(kind, "its chunked attention cuts the positions that windows share")
    sliding_windows_of(config)


Split = Callable[[Sequence[int], Sequence[int], Sequence[int]], torch.Tensor]
"""Logits (tokens, vocabulary), fp32, of a query's tokens, from prefix, window and query."""


def check_attention(
    model: PreTrainedModel,
    split: Split,
    ids: Sequence[Sequence[int]],
    cut: Split | None = None,
    failing: str = "its own attention code can't run beside windows",
) -> None:
    """Compare a split prompt with the plain model on a few tokens.

    A model whose attention ignores the registry, its position ids or the windows would give
    wrong answers without an error, and so would one whose cache holds something else than the keys
    and values of its attention. Where both differ by more than a dtype usually rounds, the measure
    is the model's own rounding: the same prompt in one pass, and cut in the same places by its KV
    cache.

    Args:
        ids: of a prefix, a window and a query, as `probe_ids` gives them.
        cut: the model's own, cut by its KV cache; by default in the same places.
        failing: the reason where ``split`` fails.

    Raises:
        UnsupportedModelError: naming the model type and what differed, by how much.
    """
    kind, query = model.config.model_type, len(ids[-1])
    training = [module for module in model.modules() if module.training]
    noise = 0.0
    try:
        with torch.no_grad():
            found = split(*ids)
            model.eval()
            row = torch.tensor([[one for part in ids for one in part]], device=input_device(model))
            plain = model(row).logits[0, -query:].float()
            difference = _relative(found, plain)
            if not difference <= (limit := _tolerance(model)) and plain.isfinite().all():
                own = _cut(model, row, [len(one) for one in ids]) if cut is None else cut(*ids)
                noise = _relative(own, plain)
                limit = min(max(limit, NOISE_FACTOR * noise), LARGEST_TOLERANCE)
    except UnsupportedModelError as error:
        raise refusal(kind, error.reason or str(error)) from error
    except RagWindowsError:
        raise
    except KeyError as error:
        reason = "its layers do not call the registered attention function"
        raise refusal(kind, reason) from error
    except (RuntimeError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise refusal(kind, f"{failing} ({_shortened(error)})") from error
    finally:
        # Not by train(), which would set all submodules to the same mode.
        for module in training:
            module.training = True
    if difference <= limit:
        return
    dtype = str(model.dtype).removeprefix("torch.")
    wider = "" if model.dtype in _EXACT else "Load it with dtype='float32', which rounds less. "
    reason = (
        f"one window gives other logits than ordinary attention (off by {difference:.1%}; the "
        f"limit is {limit:.1%}, and its own rounding in {dtype} makes {noise:.1%})"
    )
    if not plain.isfinite().all():
        reason = f"it gives NaN or infinity for ordinary text in {dtype}"
    refused = refusal(kind, reason, wider)
    refused.measured = True
    raise refused


def _shortened(error: Exception) -> str:
    return " ".join(str(error).rstrip(".").split())[:_LONGEST_ERROR]


_LONGEST_ERROR = 100
_EXACT = (torch.float32, torch.float64)


def _relative(found: torch.Tensor, plain: torch.Tensor) -> float:
    return float((found - plain).norm() / plain.norm().clamp_min(1e-6))


def _cut(model: PreTrainedModel, row: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    """Logits (tokens, vocabulary), fp32, of the last part, each part read from the KV cache."""
    cache = DynamicCache(config=model.config)
    for part in row.split([*lengths], dim=1):
        output = model(part, use_cache=True, **{CACHE: cache})
    return torch.as_tensor(output.logits)[0].float()


def _tolerance(model: PreTrainedModel) -> float:
    exact = model.dtype in _EXACT and not getattr(model, "is_quantized", False)
    return EXACT_TOLERANCE if exact else ROUGH_TOLERANCE


def refusal(kind: str, reason: str, first: str = "") -> UnsupportedModelError:
    """What says that a model type can't be used, why, and what to do first, before another one."""
    error = UnsupportedModelError(
        f"Model type '{kind}' can't read parallel windows: {reason}. {first}Choose a decoder-only "
        "model with rotary or learned positions, such as Llama, Qwen, Mistral or Gemma."
    )
    error.reason = reason
    return error
