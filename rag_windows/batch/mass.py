"""Attention mass in a batch: how much each cited row gives to each part of its windows."""

from __future__ import annotations

import torch

from rag_windows.attention.shares import scores_of
from rag_windows.batch.ask import Ask
from rag_windows.batch.plan import Plan


def record(
    plan: Plan, ask: Ask, context_lse: torch.Tensor, weights: list[torch.Tensor], prefix: bool
) -> None:
    """Add one layer's shares to the plan's.

    A part's share is the context's merged weight times ``exp(l_part - l_C)`` at the method's
    temperature, averaged over heads. An attention sink takes mass but is no text: shares are
    normalised without it.

    Args:
        plan: of the pass; takes the shares of the rows that are cited.
        ask: the layer.
        context_lse: (tokens, heads), before the methods' rescaling.
        weights: (tokens, heads) each: merged weights of the tail, of the prefixes if there are any,
            and of the windows.
        prefix: whether there are prefixes.
    """
    own = plan.own
    if own is None:
        return
    text = torch.stack(weights).sum(dim=0).clamp_min(torch.finfo(context_lse.dtype).tiny)
    tail, *before, context = (weight / text for weight in weights)
    tokens = own.tokens.to(context_lse.device)
    own.query = _sum(own.query, tail[tokens].mean(dim=1))
    of_prefix = before[0] if prefix else torch.zeros_like(tail)
    own.prefix = _sum(own.prefix, of_prefix[tokens].mean(dim=1))
    for read in plan.contexts.reads:
        if not read.cited_rows:
            continue
        cited = read.cited.to(context_lse.device)
        query = ask.query[cited].transpose(0, 1).unsqueeze(0)
        scored = [
            scores_of(query, key.unsqueeze(0), ask.scale, ask.softcap, read.temperature)[0]
            for key, _ in read.stack.segments[ask.layer]
        ]
        scores = scored[0] if len(scored) == 1 else torch.cat(scored, dim=-1)
        mask = ask.mask(read, read.cited)
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf)
        lse = context_lse[cited].transpose(0, 1).unsqueeze(-1)
        inside = torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0.0))
        shares = (inside * context[cited].transpose(0, 1).unsqueeze(-1)).mean(dim=0)
        parts = shares.new_zeros(len(cited), read.stack.n_parts)
        parts.index_add_(1, read.stack.parts.to(shares.device), shares)
        read.mass = _sum(read.mass, parts)


def _sum(held: torch.Tensor | None, new: torch.Tensor) -> torch.Tensor:
    return new.clone() if held is None else held + new.to(held.device)
