"""Which models the hook can serve; the others are refused at load, by name and with the reason."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from rag_windows.attention.capture import Capture
from rag_windows.attention.layout import Layout, use_layout
from rag_windows.attention.reach import layer_reach
from rag_windows.device import input_device
from rag_windows.errors import RagWindowsError, UnsupportedModelError
from rag_windows.windows import Window, pack

EXACT_TOLERANCE = 1e-3
ROUGH_TOLERANCE = 0.25
"""Relative error allowed between windows and ordinary attention on the probe, fp32 and below."""


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
    if getattr(config, "use_bidirectional_attention", None):
        raise _refusal(kind, "its attention looks ahead, so a window has no fixed keys")
    if getattr(config, "num_kv_shared_layers", 0) or getattr(config, "kv_sharing_modes", None):
        raise _refusal(kind, "its layers share keys and values with each other")
    if getattr(config, "attention_chunk_size", None):
        raise _refusal(kind, "its chunked attention cuts the positions that windows share")
    layer_reach(config)


def check_attention(model: PreTrainedModel, twin: PreTrainedModel) -> None:
    """Compare a split prompt with the plain model on four tokens.

    A model whose attention ignores the registry, its position ids or the windows would answer
    wrongly without a word; one small forward pass finds out.

    Raises:
        UnsupportedModelError: naming the model type and what differed.
    """
    config = model.config.get_text_config(decoder=True)
    kind = model.config.model_type
    ids = [1 + i % max(1, config.vocab_size - 2) for i in range(4)]
    reach = layer_reach(config)
    try:
        with torch.no_grad():
            window = _probe(twin, Layout(0, 0, reach), ids[:2], 0)
            if sorted(window.keys) != list(range(len(reach))):
                raise _refusal(kind, "its layers do not call the registered attention function")
            packed = pack([as_window(window, ids[:2], 0)], [[0, 0]], 1)
            layout = Layout(0, 2, reach, windows=packed)
            split = _logits(twin, layout, ids[2:], 2)
            was_training = model.training
            model.eval()
            try:
                plain = model(_row(model, ids)).logits[0, -1].float()
            finally:
                model.train(was_training)
    except UnsupportedModelError as error:
        raise _refusal(kind, str(error)) from error
    except (RuntimeError, TypeError, ValueError, AttributeError, KeyError, IndexError) as error:
        if isinstance(error, RagWindowsError):
            raise
        raise _refusal(kind, f"a forward pass with windows failed ({error})") from error
    difference = (split[-1] - plain).norm() / plain.norm().clamp_min(1e-6)
    quantized = getattr(model, "is_quantized", False)
    exact = model.dtype in (torch.float32, torch.float64) and not quantized
    if not difference <= (EXACT_TOLERANCE if exact else ROUGH_TOLERANCE):
        raise _refusal(
            kind,
            f"one window gives other logits than ordinary attention (off by {difference:.1%})",
        )


def as_window(capture: Capture, ids: Sequence[int], start: int) -> Window:
    """One row's captured keys and values as a window that begins at position ``start``."""
    layers = range(len(capture.keys))
    return Window(
        ids=tuple(ids),
        start=start,
        keys=tuple(capture.keys[i][0] for i in layers),
        values=tuple(capture.values[i][0] for i in layers),
    )


def _refusal(kind: str, reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"Model type '{kind}' can't read parallel windows: {reason}. Choose a decoder-only model "
        "with rotary or learned positions, such as Llama, Qwen, Mistral or Gemma."
    )


def _row(model: PreTrainedModel, ids: Sequence[int]) -> torch.Tensor:
    return torch.tensor([list(ids)], device=input_device(model))


def _probe(twin: PreTrainedModel, layout: Layout, ids: Sequence[int], start: int) -> Capture:
    capture = Capture()
    probe = Layout(layout.prefix_length, layout.query_start, layout.reach, capture=capture)
    _logits(twin, probe, ids, start)
    return capture


def _logits(twin: PreTrainedModel, layout: Layout, ids: Sequence[int], start: int) -> torch.Tensor:
    positions = torch.arange(start, start + len(ids), device=input_device(twin)).unsqueeze(0)
    with use_layout(layout):
        output = twin(_row(twin, ids), position_ids=positions, use_cache=False)
    return torch.as_tensor(output.logits[0]).float()
