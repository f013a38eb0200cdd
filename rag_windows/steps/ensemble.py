"""Windows that each answer separately, and the combination of their answers."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from rag_windows.attention.layers import CACHE
from rag_windows.attention.layout import PromptLayout, current_layout, use_layout
from rag_windows.attention.weights import WeightRecorder
from rag_windows.errors import RagWindowsError
from rag_windows.kv import Members
from rag_windows.methods.combination import Combination, RowLogits
from rag_windows.steps.ensemble_cache import EnsembleCache

MAX_ROW_TOKENS = 8192
"""Tokens of all rows together that one forward pass holds at most, one a row at least."""

MAX_LOGITS = 2**26
"""Logits of all rows together that one forward pass gives at most, one token a row at least."""


@dataclass(slots=True)
class EnsembleLayout(PromptLayout):
    """A query whose windows, the members, answer each for itself."""

    members: Members = field(kw_only=True)
    combination: Combination = field(kw_only=True)
    _rows: EnsembleLayout | None = field(default=None, init=False, repr=False)

    def of_pass(self, recorder: WeightRecorder | None) -> EnsembleLayout:
        """The layout of one forward pass; all passes share what they need prepared only once."""
        if self._rows is None:
            self._rows = replace(self)
        self._rows.recorder = recorder
        return self._rows


@dataclass(frozen=True, slots=True)
class Pass:
    """The output of one forward pass for its last tokens, from ``first_position`` on.

    ``logits`` (queries, windows, tokens, vocabulary) are in the model's dtype; ``prior`` (queries,
    tokens, vocabulary) is the row without a window.
    """

    logits: torch.Tensor
    prior: torch.Tensor | None
    first_position: int
    recorder: WeightRecorder | None

    def rows(
        self,
        fixed: torch.Tensor | None,
        memory: dict[str, torch.Tensor],
        windows: Sequence[int] | None = None,
    ) -> RowLogits:
        """What is combined, in fp32 at least: of some windows, or of all for None."""
        logits = self.logits if windows is None else self.logits[:, windows]
        prior = None if self.prior is None else exact(self.prior)
        return RowLogits(exact(logits), prior, fixed, memory)


def exact(logits: torch.Tensor) -> torch.Tensor:
    """Logits in fp32 at least."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def passes(
    mirror: PreTrainedModel,
    layout: EnsembleLayout,
    ids: torch.Tensor,
    positions: torch.Tensor,
    cache: EnsembleCache,
    last: int,
) -> Iterator[Pass]:
    """Run every query with every window, each pair in a batch row of its own.

    Tokens ``ids`` (queries, tokens) at ``positions`` (queries or 1, tokens) are cut into as few
    passes as the two bounds allow, one after the other through the KV cache. Those that hold some
    of the last ``last`` tokens are yielded.
    """
    members, (queries, tokens) = layout.members, ids.shape
    batch = queries * members.per_query
    vocabulary = int(mirror.config.get_text_config(decoder=True).vocab_size)
    by_tokens = max(1, MAX_ROW_TOKENS // batch)
    by_logits = max(1, MAX_LOGITS // (batch * vocabulary))
    wanted = tokens - min(last, tokens)
    start = 0
    while start < tokens:
        stop = min(tokens, start + by_tokens, max(start, wanted) + by_logits)
        first = max(start, wanted)
        held = cache.get_seq_length()
        recorder = None
        if layout.recorder is not None:
            recorder = WeightRecorder(max(layout.recorder.first_position, layout.position(held)))
        places = positions[:, start:stop].expand(queries, -1)
        with use_layout(layout.of_pass(recorder)):
            logits = cache.read(mirror, ids[:, start:stop], places, max(1, stop - first))
        if stop > first:
            by_window = logits.unflatten(0, (queries, members.per_query))
            yield Pass(
                logits=by_window[:, : members.count],
                prior=by_window[:, -1] if members.prior else None,
                first_position=layout.position(held + first - start),
                recorder=recorder,
            )
        start = stop


_OF_GENERATE = "prepare_inputs_for_generation", "_update_model_kwargs_for_generation"


def make_view(mirror: PreTrainedModel, *, own_cache: bool = False) -> PreTrainedModel:
    """A view of the model whose forward pass runs each query with every window.

    It shares all of the model's modules and has no state. To transformers' own ``generate`` (its
    loop, processors, criteria and streamers) a query is one row; the rows of its windows exist only
    inside the forward pass. Which windows these are stands in the call's layout.

    With ``own_cache`` the rows go on from the model's own cache. Then ``generate`` gives the view
    what it gives most models, whatever this one takes: that is inside of its `RowsCache`.
    """
    view = cast(Any, type(mirror)).__new__(type(mirror))
    view.__dict__.update(mirror.__dict__)
    forward: Any = functools.partial(_forward, mirror)
    if own_cache:
        for name in _OF_GENERATE:
            view.__dict__[name] = types.MethodType(getattr(GenerationMixin, name), view)
        # There is one always.
        view.__dict__["_prepare_cache_for_generation"] = lambda *_, **__: None
    else:
        # Its name and signature are the model's: transformers asks which inputs it takes.
        forward = functools.wraps(mirror.forward)(forward)
    view.__dict__["forward"] = forward
    return cast(PreTrainedModel, view)


def _forward(
    mirror: PreTrainedModel,
    input_ids: torch.Tensor,
    *,
    position_ids: torch.Tensor | None = None,
    logits_to_keep: int | torch.Tensor = 0,
    **inputs: Any,
) -> CausalLMOutputWithPast:
    """Combined log-probabilities (queries, tokens, vocabulary), fp32 at least.

    Other ``inputs`` than the KV cache are ignored: masks and what else to return are about the rows
    that ``generate`` has, and the model is given others.
    """
    layout = current_layout()
    if not isinstance(layout, EnsembleLayout) or position_ids is None:
        raise RagWindowsError(
            "The model of an ensemble was called outside of a request. Call the model itself."
        )
    last = int(logits_to_keep) or input_ids.shape[1]
    parts, cache = [], cast(EnsembleCache, inputs.get(CACHE))
    for one in passes(mirror, layout, input_ids, position_ids, cache, last):
        rows = one.rows(layout.members.fixed, cache.memory)
        combined, weights = layout.combination.combine(rows)
        parts.append(combined)
        _record(layout, one, weights)
    return CausalLMOutputWithPast(logits=torch.cat(parts, dim=1), **{CACHE: cache})


def _record(layout: EnsembleLayout, one: Pass, weights: torch.Tensor) -> None:
    """Record the windows' attention weights for the request, weighted as their answers are."""
    members = layout.members
    if layout.recorder is None or one.recorder is None:
        return
    groups = members.groups.to(weights.device)
    one.recorder.settle()
    if not one.recorder.sums:
        # Where the model's own attention reads, only a row's share of the answer is known.
        for token in range(weights.shape[2]):
            position = one.first_position + token
            if position >= one.recorder.first_position:
                whole = weights.new_zeros(len(weights), members.n_groups + 2)
                whole.index_add_(1, groups, weights[:, :, token])
                layout.recorder.sums[position] = whole
    for position, sums in one.recorder.sums.items():
        token = position - one.first_position
        if token < 0:
            continue
        rows = sums.unflatten(0, (-1, members.per_query))[:, : members.count]
        weighted = rows.to(weights.device) * weights[:, :, token].unsqueeze(-1)
        whole = weighted.new_zeros(len(weighted), members.n_groups + 2)
        whole.index_add_(1, groups, weighted[..., 0])
        whole[:, -2:] = weighted[..., 1:].sum(dim=1)
        layout.recorder.sums[position] = whole
