"""Attention mass of each citation group, from the segments' log-sum-exps."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rag_windows.attention.backends import Request
from rag_windows.attention.layout import Layout


def record_shares(
    layout: Layout,
    layer: int,
    tail: Sequence[Request],
    context: Request,
    tail_lse: torch.Tensor,
    context_lse: torch.Tensor,
    weights: list[torch.Tensor],
) -> None:
    """Record how the merged softmax of each answer row splits over groups, prefix and query.

    A group's share is the context's merged weight times ``exp(l_group - l_C)``, where ``l`` are
    log-sum-exps at the method's temperature. An attention sink takes mass but is no text: shares
    are normalised without it.

    Args:
        layout: of this call; its windows and recorder are set.
        layer: which layer's shares these are.
        tail: (batch, heads, rows) over the tail, or over prefix and query one by one.
        context: the folded request over the windows.
        tail_lse: (batch, heads, rows) of the last of these.
        context_lse: same shape, before the method's rescaling.
        weights: merged weights of those segments and of the context, same shape.
    """
    windows, recorder = layout.windows, layout.mass
    if windows is None or recorder is None:
        return
    batch, heads, rows, _ = tail[-1].query.shape
    length = sum(request.key.shape[2] for request in tail)
    # A prompt that is read in chunks has none in all chunks but the last.
    recorded = [
        row
        for row in range(rows)
        if layout.position(length - rows + row) >= recorder.first_position
    ]
    if not recorded:
        return
    groups = windows.groups.to(tail_lse.device)
    kv_heads = context.key.shape[1]
    # What a sink takes is missing from the weights' sum; shares are of the text alone.
    text = torch.stack(weights).sum(dim=0).clamp_min(torch.finfo(tail_lse.dtype).tiny)
    *of_tail, of_context = (weight / text for weight in weights)
    for row in recorded:
        query = tail[-1].query[:, :, row]
        scores = _scores(query, context.key.expand(batch, -1, -1, -1), context)
        if context.mask is not None:
            mask = context.mask.view(batch * (heads // kv_heads), rows, -1)[0, row]
            scores = scores.masked_fill(~mask, -torch.inf)
        lse = context_lse[:, :, row].unsqueeze(-1)
        inside = torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0.0))
        tokens = (inside * of_context[:, :, row].unsqueeze(-1)).mean(dim=1)
        share = tokens.new_zeros(batch, windows.n_groups + 2)
        if windows.shares is None:
            share.index_add_(1, groups, tokens)
        else:
            share[:, :-2] = tokens @ windows.shares.to(tokens)
        tail_share = torch.stack([share[:, :, row].mean(dim=1) for share in of_tail]).sum(dim=0)
        if len(of_tail) > 1:
            share[:, -2] = of_tail[0][:, :, row].mean(dim=1)
        elif layout.prefix_length:
            prefix = prefix_part(layout.prefix_length, tail[0], tail_lse, row)
            share[:, -2] = (of_tail[0][:, :, row] * prefix).mean(dim=1)
        share[:, -1] = (tail_share - share[:, -2]).clamp_min(0.0)
        recorder.put(layer, layout.position(length - rows + row), share)


def prefix_part(length: int, tail: Request, lse: torch.Tensor, row: int) -> torch.Tensor:
    """Share of the tail's mass that one row gives to the prefix, (batch, heads)."""
    scores = _scores(tail.query[:, :, row], tail.key[:, :, :length], tail)
    if tail.mask is not None:
        scores = scores.masked_fill(~tail.mask[row, :length], -torch.inf)
    return torch.exp(scores - lse[:, :, row].unsqueeze(-1)).sum(dim=-1)


def _scores(query: torch.Tensor, key: torch.Tensor, request: Request) -> torch.Tensor:
    """Logits (batch, heads, keys) of one row (batch, heads, head dim), fp32."""
    made = scores_of(query.unsqueeze(2), key, request.scale, request.softcap, request.temperature)
    return made.squeeze(2)


def scores_of(
    query: torch.Tensor,
    key: torch.Tensor,
    scale: float,
    softcap: float | None,
    temperature: float,
) -> torch.Tensor:
    """Logits, as a backend has them before its softmax.

    Args:
        query: (batch, heads, rows, head dim).
        key: (batch, kv heads, keys, head dim).
        scale: multiplies the logits.
        softcap: caps them, or None.
        temperature: divides them then.

    Returns:
        (batch, heads, rows, keys), fp32 (fp64 for fp64 inputs).
    """
    kv_heads, rows = key.shape[1], query.shape[2]
    exact = torch.promote_types(query.dtype, torch.float32)
    grouped = query.to(exact).unflatten(1, (kv_heads, -1)).flatten(2, 3)
    scores = (grouped @ key.to(exact).transpose(-1, -2)) * scale
    scores = scores.unflatten(2, (-1, rows)).flatten(1, 2)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    return scores / temperature
