"""Forward passes over an ensemble's rows, as many as memory asks for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedModel

from rag_windows.attention.layout import PromptLayout, WeightRecorder, use_layout
from rag_windows.kv import Members, RowsCache

MAX_ROW_TOKENS = 8192
"""Tokens of all rows together that one forward pass holds at most, one a row at least."""

MAX_LOGITS = 2**26
"""Logits of all rows together that one forward pass gives at most, one token a row at least."""


@dataclass(frozen=True, slots=True)
class Pass:
    """What one forward pass gave.

    Attributes:
        logprobs: (queries, windows, tokens, vocabulary) log-probabilities, fp32 at least.
        prior: (queries, tokens, vocabulary) of the row without a window, or None.
        first_position: position of the first of these tokens.
        mass: the rows' attention mass, or None.
    """

    logprobs: torch.Tensor
    prior: torch.Tensor | None
    first_position: int
    mass: WeightRecorder | None


def passes(
    twin: PreTrainedModel,
    layout: PromptLayout,
    members: Members,
    ids: torch.Tensor,
    positions: torch.Tensor,
    tail: RowsCache,
    kept: int,
) -> Iterator[Pass]:
    """Run every query beside every window.

    Tokens are cut into as few passes as the two bounds allow, one after the other through the
    tail, which changes nothing but the memory that a pass takes.

    Args:
        twin: the model with our attention.
        layout: of this call.
        members: the windows.
        ids: (queries, tokens) int64.
        positions: (queries or 1, tokens) int64.
        tail: of these queries; it grows by the tokens.
        kept: how many last tokens' distributions are wanted, at least one.

    Yields:
        A pass for every piece that holds wanted tokens, in order.
    """
    queries, tokens = ids.shape
    batch = queries * members.per_query
    vocabulary = int(twin.config.get_text_config(decoder=True).vocab_size)
    by_tokens = max(1, MAX_ROW_TOKENS // batch)
    by_logits = max(1, MAX_LOGITS // (batch * vocabulary))
    wanted = tokens - min(kept, tokens)
    start = 0
    while start < tokens:
        stop = min(tokens, start + by_tokens, max(start, wanted) + by_logits)
        first = max(start, wanted)
        held = tail.get_seq_length()
        mass = None
        if layout.recorder is not None:
            mass = WeightRecorder(max(layout.recorder.first_position, layout.position(held)))
        logits = _logits(
            twin,
            replace(layout, recorder=mass),
            members,
            ids[:, start:stop],
            positions[:, start:stop],
            tail,
            max(1, stop - first),
        )
        if stop > first:
            rows = logits.log_softmax(dim=-1).unflatten(0, (queries, members.per_query))
            yield Pass(
                logprobs=rows[:, : members.count],
                prior=rows[:, -1] if members.prior else None,
                first_position=layout.position(held + first - start),
                mass=mass,
            )
        start = stop


def _logits(
    twin: PreTrainedModel,
    layout: PromptLayout,
    members: Members,
    ids: torch.Tensor,
    positions: torch.Tensor,
    tail: RowsCache,
    last: int,
) -> torch.Tensor:
    """(rows, last, vocabulary) logits of the last tokens, fp32 at least."""
    rows = positions.expand(len(ids), -1).repeat_interleave(members.per_query, dim=0)
    with use_layout(layout):
        output = twin(
            ids.repeat_interleave(members.per_query, dim=0),
            position_ids=rows,
            past_key_values=tail,
            use_cache=True,
            logits_to_keep=last,
        )
    logits = torch.as_tensor(output.logits)[:, -last:]
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
