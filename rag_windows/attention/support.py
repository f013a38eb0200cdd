"""Which models the hook can serve; the others are refused at load, by name and with the reason."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from transformers import PreTrainedModel

from rag_windows.attention.layers import sliding_windows_of
from rag_windows.errors import RagWindowsError, UnsupportedModelError
from rag_windows.loading import input_device

EXACT_TOLERANCE = 1e-3
ROUGH_TOLERANCE = 0.05
"""Relative error allowed between windows and ordinary attention on the probe, fp32 and below."""

DYNAMIC_TOLERANCE = 0.2
"""The same where PyTorch's ``quantize_dynamic`` rounds each module's inputs by the largest of those
that are computed together, so that every split prompt is rounded otherwise."""


def check_config(model: PreTrainedModel) -> None:
    """Refuse what the config already tells.

    Raises:
        UnsupportedModelError: naming the model type and the reason.
    """
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
    values of its attention. One small question behind a prefix and a window finds out.

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
