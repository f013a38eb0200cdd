"""Segments of one call attended and mixed: the part of the hook behind what each row sees."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rag_windows.attention.backends import Request, attend
from rag_windows.attention.backends.request import Segment
from rag_windows.attention.layout import Layout
from rag_windows.attention.merge import merge, merge_two, merge_weights
from rag_windows.attention.row_shares import record_row_shares
from rag_windows.attention.shares import record_shares


def mix(
    layout: Layout,
    layer: int,
    query: torch.Tensor,
    tail: Sequence[Request],
    context: Request | None,
    beside: Segment | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attend to each segment and merge, as the layout's method rescales them.

    Args:
        layout: of this call.
        layer: its number.
        query: (batch, heads, rows, head dim); the rows are the newest of the tail.
        tail: one request, or prefix and query as two; every row sees itself in the last one.
        context: over the windows, batch rows and heads of one kv head folded into rows; or None.
        beside: a segment of each batch row's own that is attended already, or None.
        sinks: (heads,) logits of attention sinks, or None.

    Returns:
        (batch, heads, rows, value dim) in the query's dtype.
    """
    outputs, lses = [], []
    for request in tail:
        output, lse = attend(request)
        outputs.append(output)
        lses.append(lse)
    sink = None if sinks is None else sinks.to(lses[0].dtype).view(1, -1, 1)
    if context is None and beside is None and sink is None:
        return outputs[0]
    own_lse = lses[-1]
    if layout.query_bias:
        lses[-1] = own_lse + layout.query_bias
    if beside is not None:
        outputs.append(beside[0])
        lses.append(beside[1])
    if context is not None:
        folded_output, folded_lse = attend(context)
        context_lse = _unfold(folded_lse, query)
        outputs.append(_unfold(folded_output, query))
        lses.append(layout.method.context_lse(context_lse))
    if layout.mass is None and sink is None and len(outputs) == 2:
        # The newest row always sees itself, so no row is empty in both.
        return merge_two(outputs, lses)
    weights = merge_weights(lses, sink)
    if layout.mass is not None and context is not None:
        record_shares(layout, layer, tail, context, own_lse, context_lse, weights)
    elif layout.mass is not None and beside is not None:
        record_row_shares(layout, layer, tail, own_lse, weights)
    return merge(outputs, weights)


def _unfold(folded: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """(1, kv heads, batch * groups * rows, ...) back to (batch, heads, rows, ...)."""
    batch, heads, rows, _ = query.shape
    if batch == 1:
        return folded.reshape(1, heads, rows, *folded.shape[3:])
    kv_heads = folded.shape[1]
    split = folded.squeeze(0).unflatten(1, (batch, heads // kv_heads, rows))
    return split.transpose(0, 1).flatten(1, 2)
