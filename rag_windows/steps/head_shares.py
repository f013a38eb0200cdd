"""How much each attention head looks at each passage while an answer is written."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import cast

import torch

from rag_windows.attention.merge import Weights
from rag_windows.attention.segments import Queries
from rag_windows.attention.weights import segment_weights
from rag_windows.kv import Windows
from rag_windows.prefill import EncodedContext, ModelEncoder
from rag_windows.steps.packed_rows import BatchLayout, FedRow, Plan, RowCaches, read_rows


class _HeadsLayout(BatchLayout):
    """Records the attention on windows by layer and head, token by token."""

    @cached_property
    def of_windows(self) -> list[torch.Tensor]:
        """By layer (spans, tokens, heads), fp32, on the CPU."""
        return []

    @property
    def weighs(self) -> bool:
        """Always."""
        return True

    def record(self, weights: Weights, asked: Queries) -> None:
        """See `Layout.record`."""
        own = next(one for one in segment_weights([weights]) if one.role == "context")
        self.of_windows.append(own.of_parts()[:, 0].float().cpu())


@torch.no_grad()
def head_shares(
    encoder: ModelEncoder,
    context: EncodedContext,
    query_ids: Sequence[int],
    answer_ids: Sequence[int],
) -> torch.Tensor | None:
    """Attention on each citation group, summed over the tokens of an answer.

    These are the ``a_lh(j)`` of AT2, "Learning to Attribute with Attention",
    https://arxiv.org/abs/2504.13752.

    Args:
        context: what the query reads, settled.
        answer_ids: at least one token.

    Returns:
        (layers, heads, groups) fp32, on the CPU; None where windows are not read together.
    """
    if not isinstance(context.windows, Windows):
        return None
    plan = Plan([FedRow(context, [*query_ids, *answer_ids[:-1]])], 0)
    _, layout = read_rows(encoder, plan, RowCaches(), plan.newest, layout_kind=_HeadsLayout)
    spans = torch.stack(cast(_HeadsLayout, layout).of_windows)[:, :, -len(answer_ids) :].sum(dim=2)
    return torch.einsum("lsh,sg->lhg", spans, context.windows.span_groups)
