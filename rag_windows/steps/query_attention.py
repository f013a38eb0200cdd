"""Tokens of windows that are encoded again for one query: those to which it attends most."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from rag_windows.attention.layers import CACHE
from rag_windows.attention.layout import PromptLayout, use_layout
from rag_windows.attention.segments import Queries, Weights, weights_of_keys
from rag_windows.loading import input_device
from rag_windows.prefill import EncodedContext
from rag_windows.steps.recompute import Encoding, recompute


@dataclass(slots=True)
class AttentionLayout(PromptLayout):
    """A query whose attention to each token of the windows is summed up over a pass.

    ``paid`` (tokens of all windows,), fp32 (fp64 for fp64), is None before the pass. With ``last``
    only the query's last token counts, in the middle half of the layers: behind them it attends to
    what it will write, right or wrong.
    """

    last: bool = False
    paid: torch.Tensor | None = field(default=None, init=False)

    @property
    def weighs(self) -> bool:
        """All attention weights are wanted."""
        return True

    def record(self, weights: Weights, asked: Queries) -> None:
        """Add a layer's weights."""
        layers, first = len(self.sliding_windows), 0
        if self.last:
            if not layers // 4 <= asked.layer < layers - layers // 4:
                return
            first = len(asked.query) - 1
        paid = weights_of_keys(weights, asked, "context", first)
        self.paid = paid if self.paid is None else self.paid + paid.to(self.paid.device)


@torch.no_grad()
def attention_paid(
    context: EncodedContext, query_ids: Sequence[int], encoder: Encoding, layout: AttentionLayout
) -> torch.Tensor:
    """How much a query attends to each token of the windows, as they were encoded.

    The query is read once, and what that gives beside its attention is thrown away. ProphetKV
    (https://arxiv.org/abs/2602.02579) scores a token ``t`` in layer ``l`` by
    ``a_l(t) = mean over query tokens q of softmax(q K / sqrt(d))_t`` over the context's keys ``K``,
    and chooses by the mean of ``a_l`` over all layers. Here it is a sum, which has the same order.
    What differs: the weights are those with which the query does read the windows, so its own
    tokens and the prefix take part in the softmax, and a method's temperature and scale count; the
    query is everything behind the passages, not only the question.

    Returns:
        (tokens of all windows,) on the CPU: the attention weights of each, summed over heads,
        layers and the query's tokens, or fewer of them, as the layout says. Attention sinks count
        for nothing, as in citations.
    """
    device = input_device(encoder.model)
    positions = torch.arange(context.query_start, context.query_start + len(query_ids))
    ids = torch.tensor([list(query_ids)], dtype=torch.int64, device=device)
    with use_layout(layout):
        encoder.model.base_model(
            ids,
            position_ids=positions.unsqueeze(0).to(device),
            use_cache=True,
            **{CACHE: context.new_cache()},
        )
    return torch.as_tensor(layout.paid).cpu()


def _with_next(paid: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    """Each token counts at least as much as the one in front of it in its window.

    An answer often depends on several tokens, of which the first gets the attention.
    """
    one_on = [torch.cat([own[:1], own[:-1]]) for own in paid.split([*lengths])]
    return torch.maximum(paid, torch.cat(one_on))


def encode_again_for(
    context: EncodedContext, query_ids: Sequence[int], encoder: Encoding, layout: AttentionLayout
) -> EncodedContext:
    """The context that this query reads: the tokens that it attends to most are encoded again.

    Tokens of the first window have seen everything before them already and are never chosen.
    """
    plan, windows = context.method.recompute, context.each
    if plan is None or len(windows) < 2:
        return replace(context, settled=True)
    paid = attention_paid(context, query_ids, encoder, layout)
    if layout.last:
        paid = _with_next(paid, [len(window.ids) for window in windows])
    made = recompute(encoder, windows, context.prefix, plan, paid)
    return replace(context.encoded_again(*made), settled=True)
