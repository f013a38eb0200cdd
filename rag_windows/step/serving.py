"""Which models and calls are served by recorded steps."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from rag_windows.attention.layout import Layout
from rag_windows.context import EncodedContext
from rag_windows.step.graphs import CudaGraphs
from rag_windows.step.steps import Steps
from rag_windows.step.tail import StaticTail

VARIABLE = "RAG_WINDOWS_CUDA_GRAPHS"
"""Environment variable that switches recording on, with the value "1".

A recording that goes wrong on a device can leave the whole process without it, and no test of ours
has run on one yet; so nobody gets it without asking.
"""

PLAIN: Mapping[str, tuple[Any, ...]] = {
    "assistant_early_exit": (None, False),
    "assistant_model": (None,),
    "custom_generate": (None,),
    "disable_compile": (None, False),
    "dola_layers": (None,),
    "guidance_scale": (None, 1),
    "num_beams": (None, 1),
    "num_return_sequences": (None, 1),
    "output_attentions": (None, False),
    "output_hidden_states": (None, False),
    "penalty_alpha": (None,),
    "prefill_chunk_size": (None,),
    "prompt_lookup_num_tokens": (None,),
}
"""Options of ``generate`` by which a step is more than one row's next logits, and the values that
switch them off; and ``disable_compile``, which is a caller's wish for ordinary steps."""


def steps_of(twin: PreTrainedModel) -> Steps | None:
    """What records the steps of a model.

    None where nobody asked for it (`VARIABLE`), and where nothing can: off CUDA, or on several
    devices.

    Args:
        twin: the model with our attention.
    """
    if os.environ.get(VARIABLE) != "1":
        return None
    devices = {parameter.device for parameter in twin.parameters()}
    if len(devices) != 1:
        return None
    (device,) = devices
    quantizer = getattr(twin, "hf_quantizer", None)
    if device.type != "cuda" or not getattr(quantizer, "is_compileable", True):
        return None
    return Steps(twin, CudaGraphs(device))


@dataclass(frozen=True, slots=True)
class Lent:
    """What a call is generated with.

    Attributes:
        view: the model to call ``generate`` of.
        tail: gives its ``past_key_values``, until the call ends.
    """

    view: PreTrainedModel
    tail: AbstractContextManager[StaticTail]


def lend(
    steps: Steps | None,
    context: EncodedContext,
    layout: Layout,
    query_tokens: int,
    option: Callable[[str], Any],
) -> Lent | None:
    """Recorded steps for a call; None where they can't serve it, or would not pay.

    Args:
        steps: of the model.
        context: what the call reads.
        layout: of the call.
        query_tokens: of its query.
        option: the value that generate will use of an option.
    """
    windows = layout.windows
    if steps is None or windows is None or not steps.usable:
        return None
    new_tokens = option("max_new_tokens") or 0
    if layout.override is not None or new_tokens <= steps.pays_from:
        return None
    if any(option(name) not in values for name, values in PLAIN.items()):
        return None
    tensors = (*windows.keys, *windows.values, windows.positions, windows.groups)
    if any(tensor.device != steps.device for tensor in tensors) or _hooked(steps.view):
        return None
    tail = steps.lend(context, layout, windows, query_tokens, new_tokens)
    return Lent(steps.view, tail)


def _hooked(model: torch.nn.Module) -> bool:
    """Whether a module calls Python of others, which a recording would leave out.

    transformers leaves hooks of its own behind once hidden states were asked for; they do nothing
    in other calls.
    """
    return any(
        hasattr(module, "_hf_hook")
        or any(
            not str(getattr(hook, "__module__", "")).startswith("transformers.")
            for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
        )
        for module in model.modules()
    )
