"""The model as transformers' generation sees it: one row in, the windows' common answer out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from rag_windows.attention import view as attention_view
from rag_windows.attention.layout import PromptLayout, current_layout
from rag_windows.ensemble.passes import Pass, passes
from rag_windows.errors import RagWindowsError
from rag_windows.kv import Members
from rag_windows.rescaling.steps import Combination

_TAKEN: ContextVar[list[Pass] | None] = ContextVar("rag_windows_ensemble_passes", default=None)


@dataclass(slots=True)
class EnsembleLayout(PromptLayout):
    """A query whose windows answer each for itself.

    Attributes:
        members: the windows; those of the layout.
        combination: makes one distribution of theirs.
    """

    members: Members = field(kw_only=True)
    combination: Combination = field(kw_only=True)


def make_view(twin: PreTrainedModel) -> PreTrainedModel:
    """A second view of the windowed model, whose forward pass asks every window.

    transformers' own ``generate`` runs on it and never sees the rows behind. What they read travels
    with the call, in its layout.

    Args:
        twin: the model with our attention.
    """
    return attention_view.make_view(twin, _forward)


@contextmanager
def taken_passes() -> Iterator[list[Pass]]:
    """Collects the distributions of the single windows, before they are combined.

    Yields:
        A list to which each forward pass in this thread or task adds its passes in token order.
    """
    passed: list[Pass] = []
    token = _TAKEN.set(passed)
    try:
        yield passed
    finally:
        _TAKEN.reset(token)


def _forward(
    twin: PreTrainedModel,
    input_ids: torch.Tensor,
    *,
    position_ids: torch.Tensor | None = None,
    past_key_values: Any = None,
    logits_to_keep: int | torch.Tensor = 0,
    **_: Any,
) -> CausalLMOutputWithPast:
    """Combined log-probabilities (queries, tokens, vocabulary), fp32 at least.

    Other arguments of the model (masks, what to return) concern rows that are not there.
    """
    layout = current_layout()
    if not isinstance(layout, EnsembleLayout) or position_ids is None:
        raise RagWindowsError(
            "The view of an ensemble was called outside of a request; call the model itself."
        )
    kept = int(logits_to_keep) or input_ids.shape[1]
    taken = _TAKEN.get()
    parts = []
    for one in passes(twin, layout, layout.members, input_ids, position_ids, past_key_values, kept):
        if taken is not None:
            taken.append(one)
        weights = layout.combination.weigh(one.logprobs, layout.members.fixed)
        parts.append(layout.combination.combine(one.logprobs, weights, one.prior))
        _record(layout, one, weights)
    return CausalLMOutputWithPast(logits=torch.cat(parts, dim=1), past_key_values=past_key_values)


def _record(layout: EnsembleLayout, one: Pass, weights: torch.Tensor) -> None:
    """Weigh the rows' attention mass and put it where the request reads it."""
    members = layout.members
    if layout.recorder is None or one.mass is None:
        return
    groups = members.groups.to(weights.device)
    for position, layers in one.mass.shares.items():
        token = position - one.first_position
        if token < 0:
            continue
        for layer, share in layers.items():
            rows = share.unflatten(0, (-1, members.per_query))[:, : members.count]
            weighed = rows.to(weights.device) * weights[:, :, token].unsqueeze(-1)
            mass = weighed.new_zeros(len(weighed), members.n_groups + 2)
            mass.index_add_(1, groups, weighed[..., 0])
            mass[:, -2:] = weighed[..., 1:].sum(dim=1)
            layout.recorder.put(layer, position, mass)
