"""How likely a query is behind each window, and what it then reads."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import cast

import torch

from rag_windows.kv import Members, Windows
from rag_windows.loading import input_device
from rag_windows.methods import ParallelEnsemble, QueryLikelihood
from rag_windows.methods.relevance import log_relevance
from rag_windows.prefill import EncodedContext, Encoder
from rag_windows.steps.ensemble import EnsembleLayout, passes
from rag_windows.steps.rows_cache import RowsCache


def rows_of(context: EncodedContext) -> EncodedContext:
    """The same windows, each of which a query reads by itself, nothing rescaled."""
    members = Members(context.each, False, None, torch.tensor(context.groups), context.n_groups)
    return replace(context, method=ParallelEnsemble(), windows=members)


def question_of(query_ids: Sequence[int], ends: Collection[int]) -> list[int]:
    """The query up to where its last turn ends, which is where the template goes on.

    All of it, if none of its tokens ends a turn.
    """
    last = max((at for at, token in enumerate(query_ids) if token in ends), default=len(query_ids))
    return list(query_ids[:last]) or list(query_ids)


@torch.no_grad()
def query_logprobs(
    encoder: Encoder, rows: EncodedContext, layout: EnsembleLayout, ids: Sequence[int]
) -> torch.Tensor:
    """Log-probability of each token of a query but the first, by row.

    Args:
        rows: the context as `rows_of` makes it, and ``layout`` that of a query against it.
        ids: at least two tokens.

    Returns:
        (windows, tokens - 1), in nats, fp32 at least.
    """
    device, start = input_device(encoder.model), rows.query_start
    fed, targets = torch.tensor([[*ids[:-1]], [*ids[1:]]], device=device)
    positions = torch.arange(start, start + len(fed), device=device).unsqueeze(0)
    cache = cast(RowsCache, rows.new_cache())
    found: list[torch.Tensor] = []
    run = passes(encoder.model, layout, fed.unsqueeze(0), positions, cache, len(fed))
    for logits in (one.logits[0] for one in run):
        done = sum(one.shape[1] for one in found)
        wanted = targets[done : done + logits.shape[1]].to(logits.device)
        index = wanted.view(1, -1, 1).expand(len(logits), -1, 1)
        found.append(logits.gather(-1, index)[..., 0] - logits.logsumexp(dim=-1))
    return torch.cat(found, dim=1)


def ranked(
    selection: QueryLikelihood, context: EncodedContext, logprobs: torch.Tensor
) -> list[int]:
    """Citation groups, the likeliest first; of equal ones the first given.

    ``logprobs`` (windows,) fp32 are of the query behind each window.
    """
    scores = logprobs.float().cpu()
    if selection.gamma and context.scores:
        scores = scores + selection.gamma * log_relevance(context.scores)
    best: dict[int, float] = {}
    for group, score in zip(context.groups, scores.tolist(), strict=True):
        best[group] = max(score, best.get(group, score))
    return sorted(best, key=lambda group: -best[group])


def joined(context: EncodedContext, chosen: Sequence[int], encoder: Encoder) -> EncodedContext:
    """Some windows, by index and in this order, as the one prompt that they are read in.

    The first stands behind the prefix already; the others are encoded in sight of it.
    """
    first, rest = context.each[chosen[0]], [context.each[index] for index in chosen[1:]]
    groups = [context.groups[index] for index in chosen]
    windows = [first]
    if rest:
        ids = [token for window in rest for token in window.ids]
        windows += encoder.run([ids], [first.end], context.prefix, before=[first])
    spans = [len(context.each[index].ids) for index in chosen]
    return replace(
        context,
        windows=Windows.of(windows, groups, context.n_groups, spans),
        query_start=windows[-1].end,
        groups=tuple(groups),
        scores=(),
    )


def read_likeliest(
    selection: QueryLikelihood,
    context: EncodedContext,
    question: Sequence[int],
    encoder: Encoder,
    rows: EncodedContext,
    layout: EnsembleLayout,
) -> EncodedContext:
    """The context that a query reads: the windows behind which its ``question`` is likeliest.

    For ``rows`` and ``layout`` see `query_logprobs`.
    """
    groups = list(dict.fromkeys(context.groups))
    if len(groups) > selection.retrieve and len(question) > 1:
        logprobs = query_logprobs(encoder, rows, layout, question).sum(dim=1)
        groups = ranked(selection, context, logprobs)[: selection.retrieve]
    if selection.reader.windowed:
        return context.choosing(groups)
    order = [i for group in groups for i, own in enumerate(context.groups) if own == group]
    return replace(joined(context, order, encoder), chosen=tuple(order), settled=True)
