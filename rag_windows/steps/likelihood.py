"""How likely a query is behind each window, and what it then reads."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from statistics import pstdev
from typing import cast

import torch

from rag_windows.kv import Members
from rag_windows.loading import input_device
from rag_windows.methods import ParallelEnsemble, QueryLikelihood
from rag_windows.methods.relevance import log_relevance
from rag_windows.prefill import EncodedContext, ModelEncoder, read_by
from rag_windows.steps.ensemble import EnsembleLayout, exact, passes
from rag_windows.steps.ensemble_cache import EnsembleCache
from rag_windows.steps.head_shares import head_shares
from rag_windows.steps.model_cache import joined_windows
from rag_windows.titles import Titles


def rows_of(context: EncodedContext) -> EncodedContext:
    """The same windows, each of which a query reads by itself, and a row that reads none."""
    members = Members(context.each, True, None, torch.tensor(context.groups), context.n_groups)
    return replace(context, method=ParallelEnsemble(), windows=members)


def question_of(query_ids: Sequence[int], ends: Collection[int]) -> tuple[int, int]:
    """Where the last question begins and ends in a query: its last turn, without what ends it.

    Behind that the template goes on, and in front of it stands the conversation. All of the query,
    if none of its tokens ends a turn.
    """
    turns = [at for at, token in enumerate(query_ids) if token in ends and at]
    if not turns:
        return 0, len(query_ids)
    return turns[-2] + 1 if len(turns) > 1 else 0, turns[-1]


MOST_TOKENS = 512
"""Tokens at a query's end that each row reads at most: the pass costs so many per window."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """What a pass over a query says of each window, and of no window in the last row.

    Attributes:
        question: (windows + 1, tokens) log-probabilities of the question's tokens, in nats, fp32.
        entropy: (windows + 1,) of the answer's first token, in nats, fp32.
    """

    question: torch.Tensor
    entropy: torch.Tensor


@torch.no_grad()
def evidence(
    encoder: ModelEncoder,
    rows: EncodedContext,
    layout: EnsembleLayout,
    query_ids: Sequence[int],
    question: tuple[int, int],
) -> Evidence:
    """Read a query in a row a window.

    Args:
        rows: the context as `rows_of` makes it, and ``layout`` that of a query against it.
        query_ids: all of the query, of which the last `MOST_TOKENS` are read.
        question: where the question begins and ends in it. The first token that is read is none of
            the question's, as no row knows its chance.
    """
    device, start = input_device(encoder.model), rows.query_start
    cut = max(0, len(query_ids) - MOST_TOKENS)
    first, stop = max(1, question[0] - cut), question[1] - cut
    ids = torch.tensor([[*query_ids[cut:]]], device=device)
    positions = torch.arange(start, start + ids.shape[1], device=device).unsqueeze(0)
    cache = cast(EnsembleCache, rows.new_cache())
    found: list[torch.Tensor] = []
    # A token's chance is what the token before it gives.
    place = first - 1
    last = torch.empty(0)
    for one in passes(encoder.model, layout, ids, positions, cache, ids.shape[1] - place):
        each = *one.logits[0], cast(torch.Tensor, one.prior)[0]
        tokens = one.logits.shape[2]
        wanted = ids[0, place + 1 : min(stop, place + 1 + tokens)]
        # Row by row: what a row's logits come to fits into a processor's cache.
        found.append(torch.stack([_log_chance(logits, wanted) for logits in each]))
        place += tokens
        last = torch.stack([logits[-1] for logits in each])
    logprobs = exact(last).log_softmax(dim=-1)
    # A token that can't come adds nothing, though its logarithm is infinite.
    entropy = -(logprobs.exp() * logprobs.clamp_min(-1e4)).sum(dim=-1)
    return Evidence(torch.cat(found, dim=1).float().cpu(), entropy.float().cpu())


def _log_chance(logits: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """(tokens,) log-probability of tokens (tokens,) by logits (places, vocabulary), fp32."""
    precise = exact(logits[: len(wanted)])
    index = wanted.to(logits.device).unsqueeze(-1)
    return precise.gather(-1, index)[:, 0] - precise.logsumexp(dim=-1)


def attention_gain(
    encoder: ModelEncoder,
    context: EncodedContext,
    query_ids: Sequence[int],
    question: tuple[int, int],
) -> torch.Tensor | None:
    """How much more a query looks at each citation group because of its question.

    For the arguments see `evidence`; the context is that of all windows.

    Returns:
        (groups,) fp32; None where windows share no attention, or the query is a question alone.
    """
    without = [*query_ids[: question[0]], *query_ids[question[1] :]]
    if not without:
        return None
    # The last two tokens: those that give an answer's first token, and lead to it.
    behind = min(2, len(without)) - 1
    shares = []
    for ids in (query_ids, without):
        end = len(ids) - behind
        found = head_shares(encoder, context, ids[:end], [*ids[end:], ids[-1]])
        if found is None:
            return None
        layers = len(found)
        shares.append(found[layers // 3 : 2 * layers // 3 + 1].sum(dim=(0, 1)))
    return shares[0] - shares[1]


def _standardized(scores: torch.Tensor) -> torch.Tensor:
    spread = scores.std(correction=0)
    return (scores - scores.mean()) / spread.clamp_min(torch.finfo(scores.dtype).tiny)


def ranked(
    selection: QueryLikelihood,
    context: EncodedContext,
    found: Evidence,
    attention: torch.Tensor | None = None,
) -> list[int]:
    """Citation groups, the best first; of equal ones the first given.

    ``attention`` is what `attention_gain` gives.
    """
    *rows, prior = found.question
    scores = torch.stack(rows)
    if selection.score == "gain":
        scores = (scores - prior).clamp_min(0.0)
    scores = scores.sum(dim=1) - selection.confidence * found.entropy[:-1]
    if selection.gamma and context.scores:
        scores = scores + selection.gamma * log_relevance(context.scores)
    best: dict[int, float] = {}
    for group, score in zip(context.groups, scores.tolist(), strict=True):
        best[group] = max(score, best.get(group, score))
    own = torch.tensor([*best.values()], dtype=torch.float64)
    # What can't come behind one passage has no place on a scale with the others.
    if attention is not None and len(best) > 1 and bool(own.isfinite().all()):
        looked = selection.attention * _standardized(attention.double()[[*best]])
        best = dict(zip(best, (_standardized(own) + looked).tolist(), strict=True))
    if not selection.bridge or context.titles is None:
        return sorted(best, key=lambda group: -best[group])
    return _bridged(best, selection, context.titles)


def _bridged(scores: dict[int, float], selection: QueryLikelihood, titles: Titles) -> list[int]:
    """The same where passages that a chosen one names by their titles come nearer, once each."""
    finite = [score for score in scores.values() if math.isfinite(score)]
    gain = selection.bridge * pstdev(finite) if finite else 0.0
    order, named = list[int](), set[int]()
    while scores:
        order.append(max(scores, key=lambda group: scores[group]))
        del scores[order[-1]]
        if len(order) < selection.retrieve:
            for group in titles.named_by(order[-1]) & scores.keys() - named:
                scores[group] += gain
                named.add(group)
    return order


def joined(context: EncodedContext, chosen: Sequence[int], encoder: ModelEncoder) -> EncodedContext:
    """Some windows, by index and in this order, as the one prompt that they are read in.

    The first stands behind the prefix already; the others are encoded in sight of it.
    """
    first, rest = context.each[chosen[0]], [context.each[index] for index in chosen[1:]]
    groups = [context.groups[index] for index in chosen]
    separate = context.narrowed([first, *rest], groups)
    windows = [first]
    if rest:
        ids = [token for window in rest for token in window.ids]
        windows += encoder.run([ids], [first.end], context.prefix, before=[first])
    if context.form is not None:
        windows = [joined_windows(windows)]
    spans, rows = [len(context.each[index].ids) for index in chosen], context.form is not None
    return replace(
        context,
        windows=read_by(context.method, windows, groups, context.n_groups, (), spans, rows=rows),
        query_start=windows[-1].end,
        groups=tuple(groups),
        scores=(),
        settled=True,
        separate=separate,
    )


def read_likeliest(
    selection: QueryLikelihood,
    context: EncodedContext,
    query_ids: Sequence[int],
    question: tuple[int, int],
    encoder: ModelEncoder,
    rows: EncodedContext,
    layout: EnsembleLayout,
) -> EncodedContext:
    """The context that a query reads: the windows that make the ``question`` in it likeliest.

    Windows that were encoded in sight of others are read side by side, whatever reads the rest.

    For the arguments see `evidence`.
    """
    groups = list(dict.fromkeys(context.groups))
    if len(groups) > selection.retrieve:
        found = evidence(encoder, rows, layout, query_ids, question)
        looked = None
        if selection.attention:
            looked = attention_gain(encoder, context, query_ids, question)
        groups = ranked(selection, context, found, looked)[: selection.retrieve]
    order = [i for group in groups for i, own in enumerate(context.groups) if own == group]
    # In one prompt a chunk would not know any more what it was encoded in sight of.
    separate = any(context.each[index].start > len(context.prefix_ids) for index in order)
    if selection.reader.windowed or separate:
        return context.choosing(groups)
    return replace(joined(context, order, encoder), chosen=tuple(order))
