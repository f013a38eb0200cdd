"""Tokens of windows that are encoded again for one query: those to which it attends most."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from rag_windows.attention.backends import MAX_MASK, parts_of
from rag_windows.attention.layers import CACHE
from rag_windows.attention.layout import PromptLayout, use_layout
from rag_windows.attention.merge import LOWEST, Weights
from rag_windows.attention.segments import Queries, Segment, request_for
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
        paid = weights_of_keys(weights, asked, self.encoded[0], first)
        self.paid = paid if self.paid is None else self.paid + paid.to(self.paid.device)


def weights_of_keys(
    weights: Weights, asked: Queries, segment: Segment, first: int = 0
) -> torch.Tensor:
    """The attention weights that each key of the context gets in a layer.

    ``segment`` is all of the context, and all tokens of the pass read it.

    Returns:
        (keys,) fp32 (fp64 for fp64): summed over heads and over the tokens from ``first`` on.
    """
    by_role = weights.shares.split([one.results.columns for one in weights.attended])
    found = zip(weights.attended, by_role, strict=True)
    own, shares = next((one, share[0]) for one, share in found if one.results.role == "context")
    query, lengths = asked.query, [key.shape[2] for key, _ in segment.layers[asked.layer]]
    total = shares.new_zeros(sum(lengths))
    request, places = request_for(segment, asked)
    if request is None:
        return total
    # In the query's dtype, as they were read.
    read = parts_of(request, query.dtype)
    keys = torch.cat([key[0] for key, _ in read], dim=1).to(query.dtype).to(total.dtype)
    # (kv heads, query heads of each, tokens, ...), as keys are shared
    grouped = query.transpose(0, 1).unflatten(0, (len(keys), -1)).to(total.dtype)
    ours, whole = (
        one.transpose(0, 1).unflatten(0, (len(keys), -1)).unsqueeze(-1) for one in (shares, own.lse)
    )
    seen = total.new_zeros(keys.shape[1])
    for at in range(first, len(query), step := max(1, MAX_MASK // (query.shape[1] * len(seen)))):
        rows = slice(at, at + step)
        logits = grouped[:, :, rows] @ keys.unsqueeze(1).mT * asked.scale
        if asked.softcap is not None:
            logits = torch.tanh(logits / asked.softcap) * asked.softcap
        logits = logits / segment.temperature
        if request.mask is not None:
            logits = logits.masked_fill(~request.mask[0, :, rows], -torch.inf)
        # A token that sees nothing of the segment has no share of it.
        within = torch.exp(logits - whole[:, :, rows].clamp_min(LOWEST))
        seen += (within * ours[:, :, rows]).sum(dim=(0, 1, 2))
    for place, own_keys in zip(
        range(len(lengths)) if places is None else places,
        seen.split([key.shape[2] for key, _ in request.parts]),
        strict=True,
    ):
        # What a sliding window hides is cut off in front.
        end = sum(lengths[: place + 1])
        total[end - len(own_keys) : end] = own_keys
    return total


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
