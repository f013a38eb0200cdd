"""What an answer loses when a passage is left out of what was read."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch

from rag_windows.kv import Members
from rag_windows.loading import input_device
from rag_windows.methods import Method, stands_by_itself
from rag_windows.methods.combination import Combination
from rag_windows.prefill import PASS_TOKENS, EncodedContext, ModelEncoder
from rag_windows.steps.ensemble import MAX_LOGITS, EnsembleLayout, passes
from rag_windows.steps.ensemble_cache import EnsembleCache
from rag_windows.steps.likelihood import joined
from rag_windows.steps.packed_rows import FedRow, Plan, RowCaches, read_rows


@dataclass(frozen=True, slots=True)
class Removal:
    """Log-probabilities of an answer's tokens, in nats: (tokens,) fp32 each, on the CPU.

    Attributes:
        whole: behind all passages that were read.
        without: by citation group: behind all of them but this one.
        none: behind no passage.
        read: citation groups of all passages that were read.
    """

    whole: torch.Tensor
    without: Mapping[int, torch.Tensor]
    none: torch.Tensor
    read: tuple[int, ...] = ()

    @property
    def drops(self) -> dict[int, torch.Tensor]:
        """By citation group, what each token loses without it."""
        return {group: self.whole - left for group, left in self.without.items()}

    @property
    def gain(self) -> torch.Tensor:
        """What each token gains by all passages together."""
        return self.whole - self.none


def refusal(method: Method) -> str | None:
    """Why no passage can be left out of what a method has encoded; None if it can."""
    if not method.windowed:
        return "encodes each passage in sight of those before it"
    if method.recompute is not None:
        return "encodes tokens of a passage again in sight of the others"
    if not stands_by_itself(method.alignment):
        return "places a passage's window by the other passages"
    selection = method.selection
    if selection is not None and getattr(selection, "fusion", "concat") != "concat":
        return "mixes the windows of several passages"
    return None


def without(
    context: EncodedContext, groups: Collection[int], encoder: ModelEncoder
) -> EncodedContext:
    """The context of a query that reads the same passages but some, named by citation group.

    Nothing is encoded again but where one prompt is read, of which the others are.
    """
    if not groups:
        return context
    separate = context.separate or context
    rest = [one for one in dict.fromkeys(separate.groups) if one not in groups]
    if not rest:
        start, form = len(context.prefix_ids), context.form
        return EncodedContext(context.prefix_ids, None, context.method, start, form=form)
    left = separate.choosing(rest)
    if context.separate is None:
        return left
    return joined(left, range(len(left.each)), encoder)


@torch.no_grad()
def chances(
    encoder: ModelEncoder,
    context: EncodedContext,
    query_ids: Sequence[int],
    answer_ids: Sequence[int],
    layout: Callable[[EncodedContext], EnsembleLayout],
    forward: Callable[..., torch.Tensor],
    left_out: Sequence[Collection[int]],
    check: Callable[[], None] = lambda: None,
) -> list[torch.Tensor]:
    """How likely an answer of at least one token is behind a query without some passages.

    Each is what the same reader gives in a new request with the passages that are left.

    Args:
        context: what the query reads, settled; see `EncodedContext`.
        layout: gives that of an ensemble's queries against a context.
        forward: `Decoder.forward`, for answers with more logits than one pass may give.
        left_out: citation groups that are left out, each time.
        check: called between passes; what it raises ends the work.

    Returns:
        For each of these, (tokens,) fp32 log-probabilities in nats, on the CPU.
    """
    found: dict[int, torch.Tensor] = {}
    vocabulary = int(encoder.model.config.get_text_config(decoder=True).vocab_size)
    most = max(1, MAX_LOGITS // vocabulary)
    members: dict[int, EncodedContext] = {}
    chunk: list[tuple[int, FedRow]] = []
    for index, groups in enumerate(left_out):
        check()
        # Made one after the other: where one prompt is read, each is encoded for itself.
        one = without(context, groups, encoder)
        if isinstance(one.windows, Members) and context.method.combination is not None:
            members[index] = one
        elif len(answer_ids) > most or context.form is not None:
            found[index] = _in_pieces(forward, one, query_ids, answer_ids, most)
        else:
            row = FedRow(one, [*query_ids, *answer_ids[:-1]])
            if chunk and not _fits(encoder, [own for _, own in chunk], row, len(answer_ids)):
                found |= _of_rows(encoder, chunk, answer_ids)
                chunk = []
            chunk.append((index, row))
    if chunk:
        check()
        found |= _of_rows(encoder, chunk, answer_ids)
    if members:
        check()
        found |= _of_members(encoder, context, members, query_ids, answer_ids, layout)
    return [found[index] for index in range(len(left_out))]


def _fits(encoder: ModelEncoder, rows: Sequence[FedRow], more: FedRow, answer: int) -> bool:
    """Whether a pass may hold one more row, by its tokens and logits."""
    vocabulary = int(encoder.model.config.get_text_config(decoder=True).vocab_size)
    tokens = sum(len(row.fed) for row in (*rows, more))
    most_tokens = PASS_TOKENS[input_device(encoder.model).type != "cpu"]
    return tokens <= most_tokens and (len(rows) + 1) * answer * vocabulary <= MAX_LOGITS


def _of_rows(
    encoder: ModelEncoder, chunk: Sequence[tuple[int, FedRow]], answer_ids: Sequence[int]
) -> dict[int, torch.Tensor]:
    """The same of rows that share a pass, by their index."""
    plan, answer = Plan([row for _, row in chunk], 0), len(answer_ids)
    logits, _ = read_rows(encoder, plan, RowCaches(), plan.last(answer))
    by_row = logits.unflatten(0, (len(chunk), answer))
    return {index: _chances(own, answer_ids) for (index, _), own in zip(chunk, by_row, strict=True)}


def _in_pieces(
    forward: Callable[..., torch.Tensor],
    context: EncodedContext,
    query_ids: Sequence[int],
    answer_ids: Sequence[int],
    most: int,
) -> torch.Tensor:
    """The same of one context, so many tokens of the answer at a time."""
    ids = torch.tensor([[*query_ids, *answer_ids[:-1]]])
    cache, past = context.new_cache(), 0
    found = []
    # The query's last token predicts the answer's first one.
    for end in range(len(query_ids) - 1, ids.shape[1] + most, most):
        piece = ids[:, past : min(end, ids.shape[1])]
        if not piece.shape[1]:
            continue
        at, tokens = past - len(query_ids) + 1, piece.shape[1]
        logits = forward(context, piece, cache, past, last=tokens if at >= 0 else 1)
        past += tokens
        if at >= 0:
            found.append(_chances(logits[0].float(), answer_ids[at : at + tokens]))
    return torch.cat(found)


def _of_members(
    encoder: ModelEncoder,
    whole: EncodedContext,
    contexts: Mapping[int, EncodedContext],
    query_ids: Sequence[int],
    answer_ids: Sequence[int],
    layout: Callable[[EncodedContext], EnsembleLayout],
) -> dict[int, torch.Tensor]:
    """The same where rows answer: those that are left are combined, and no row runs twice.

    But for those whose query stands elsewhere, as it follows the longest window.
    """
    combination = whole.method.combination
    found: dict[int, torch.Tensor] = {}
    ids = torch.tensor([[*query_ids, *answer_ids[:-1]]], device=input_device(encoder.model))
    # Where rows go on from the model's own cache, each has a place of its own for the query.
    starts = {i: whole.query_start if whole.form else c.query_start for i, c in contexts.items()}
    for start in sorted({*starts.values()}):
        moved = replace(whole, query_start=start)
        own = {index: one for index, one in contexts.items() if starts[index] == start}
        places = torch.arange(start, start + ids.shape[1], device=ids.device).unsqueeze(0)
        parts: dict[int, list[torch.Tensor]] = {index: [] for index in own}
        memories: dict[int, dict[str, torch.Tensor]] = {index: {} for index in own}
        cache, done = cast(EnsembleCache, moved.new_cache()), 0
        for one in passes(encoder.model, layout(moved), ids, places, cache, len(answer_ids)):
            wanted = answer_ids[done : done + one.logits.shape[2]]
            for index, left in own.items():
                left_of = [i for i, group in enumerate(whole.groups) if group in left.groups]
                fixed = cast(Members, left.windows).fixed
                rows = one.rows(fixed, memories[index], left_of)
                combined = cast(Combination, combination).combine(rows)[0]
                parts[index].append(_chances(combined[0], wanted))
            done += len(wanted)
        found |= {index: torch.cat(made) for index, made in parts.items()}
    return found


def _chances(logits: torch.Tensor, wanted: Sequence[int]) -> torch.Tensor:
    """Log-probabilities (tokens,) of tokens by logits (tokens, vocabulary)."""
    index = torch.tensor([*wanted], device=logits.device).unsqueeze(1)
    return (logits.gather(1, index)[:, 0] - logits.logsumexp(dim=-1)).float().cpu()
