"""How likely a query is behind each window, and what it then reads."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import torch

from rag_windows.kv import Members, Windows
from rag_windows.loading import input_device
from rag_windows.methods import QueryLikelihood
from rag_windows.methods.relevance import log_relevance
from rag_windows.prefill import EncodedContext, Encoder
from rag_windows.steps.ensemble import EnsembleLayout, passes
from rag_windows.steps.rows_cache import RowsCache


def rows_of(context: EncodedContext) -> Members:
    """A context's windows, each as one that the query reads by itself."""
    return Members(context.each, False, None, torch.tensor(context.groups), context.n_groups)


def question_of(query_ids: Sequence[int], ends: Collection[int]) -> list[int]:
    """The query up to where its last turn ends, which is where the template goes on.

    All of it, if none of its tokens ends a turn.
    """
    last = max((at for at, token in enumerate(query_ids) if token in ends), default=len(query_ids))
    return list(query_ids[:last]) or list(query_ids)


@torch.no_grad()
def query_logprobs(
    encoder: Encoder, context: EncodedContext, layout: EnsembleLayout, ids: Sequence[int]
) -> torch.Tensor:
    """Log-probability of each token of a query but the first, by row.

    Returns:
        (windows, tokens - 1), in nats, fp32 at least.
    """
    members = layout.members
    rows = replace(context, windows=members)
    device = input_device(encoder.model)
    fed = torch.tensor([list(ids[:-1])], dtype=torch.int64, device=device)
    start = context.query_start
    positions = torch.arange(start, start + fed.shape[1], device=device).unsqueeze(0)
    targets = torch.tensor(list(ids[1:]), device=device)
    cache = rows.new_cache()
    if not isinstance(cache, RowsCache):
        raise TypeError(type(cache))
    found = []
    done = 0
    for one in passes(encoder.model, layout, fed, positions, cache, fed.shape[1]):
        tokens = one.logits.shape[2]
        wanted = targets[done : done + tokens].to(one.logits.device)
        picked = one.logits[0].gather(-1, wanted.view(1, -1, 1).expand(members.count, -1, 1))
        found.append(picked[..., 0] - one.logits[0].logsumexp(dim=-1))
        done += tokens
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
    query_ids: Sequence[int],
    ends: Collection[int],
    encoder: Encoder,
    layout: EnsembleLayout,
) -> EncodedContext:
    """The context that this query reads; ``ends`` are tokens that end a turn."""
    groups = list(dict.fromkeys(context.groups))
    question = question_of(query_ids, ends)
    if len(groups) > selection.retrieve and len(question) > 1:
        logprobs = query_logprobs(encoder, context, layout, question).sum(dim=1)
        groups = ranked(selection, context, logprobs)[: selection.retrieve]
    if not selection.reader.windowed:
        order = [i for group in groups for i, own in enumerate(context.groups) if own == group]
        narrow = joined(context, order, encoder)
    else:
        order = [index for index, own in enumerate(context.groups) if own in groups]
        scores = [context.scores[index] for index in order] if context.scores else []
        narrow = context.narrowed(
            [context.each[i] for i in order], [context.groups[i] for i in order], scores
        )
    return replace(narrow, chosen=tuple(order), settled=True)
