"""The model as transformers' generation sees it where single steps may be recorded."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from rag_windows.attention.view import make_view
from rag_windows.step.tail import StaticTail


def make_step_view(twin: PreTrainedModel) -> PreTrainedModel:
    """A second view of the windowed model, whose single steps the tail's session takes.

    Args:
        twin: the model with our attention.
    """
    return make_view(twin, _forward)


def _forward(
    twin: PreTrainedModel, input_ids: torch.Tensor | None = None, *args: Any, **kwargs: Any
) -> Any:
    """The twin's output; of one token alone, by its session."""
    tail, position = kwargs.get("past_key_values"), kwargs.get("position_ids")

    def ordinary() -> Any:
        return twin(input_ids, *args, **kwargs)

    if (
        input_ids is None
        or input_ids.shape != (1, 1)
        or position is None
        or not isinstance(tail, StaticTail)
        or tail.session is None
    ):
        return ordinary()
    return tail.session.step(tail, input_ids, position, ordinary)
