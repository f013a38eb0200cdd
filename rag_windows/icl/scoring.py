"""How likely a model finds given answers behind given questions, many of both at once."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from rag_windows.errors import InputError
from rag_windows.generate import Decoder
from rag_windows.kv import Members
from rag_windows.prefill import EncodedContext

MAX_ROW_TOKENS = 8192
"""Tokens, prefix and padding included, that the rows of one pass hold at most."""

MAX_VALUES = 2**26
"""Logits that one pass gives at most; and pairs of a token and a windows' token that it sees."""

MAX_PADDING = 0.1
"""Share of a pass that may be padding, before rows go to the next one."""

FREE_PADDING = 4
"""Tokens of padding a row may always have: a pass of its own would cost more."""

Ids = tuple[int, ...]
Pair = tuple[Ids, Ids]
"""A question and what follows it."""


@dataclass(frozen=True, slots=True)
class Score:
    """Likelihood of one choice as the continuation of the prompt.

    Attributes:
        choice: its text.
        logprob: sum of its tokens' log-probabilities, in nats.
        tokens: how many tokens it has.
    """

    choice: str
    logprob: float
    tokens: int

    @property
    def mean_logprob(self) -> float:
        """Log-probability per token, in nats."""
        return self.logprob / self.tokens


@dataclass(frozen=True, slots=True)
class Likelihood:
    """Of one continuation.

    Attributes:
        logprob: sum of its tokens' log-probabilities, in nats.
        greedy: whether each token is the likeliest one at its place.
    """

    logprob: float
    greedy: bool


def score_queries(
    decoder: Decoder,
    context: EncodedContext,
    queries: Sequence[Sequence[int]],
    choices: Sequence[Sequence[int]],
) -> list[list[float]]:
    """Log-probability of each choice's tokens after each query, in nats: a list a query.

    Raises:
        InputError: no choices, a choice or a query without tokens.
    """
    if not choices:
        raise InputError("score needs at least one choice.")
    for name, lists in (("Choice", choices), ("Query", queries)):
        empty = next((i for i, ids in enumerate(lists) if not ids), None)
        if empty is not None:
            raise InputError(f"{name} {empty} has no tokens; leave it out.")
    pairs = [(tuple(query), tuple(choice)) for query in queries for choice in choices]
    found = iter(likelihoods(decoder, context, pairs))
    return [[next(found).logprob for _ in choices] for _ in queries]


@torch.no_grad()
def likelihoods(
    decoder: Decoder, context: EncodedContext, asked: Sequence[Pair]
) -> list[Likelihood]:
    """How likely continuations are behind questions, both of at least one token, in order.

    A question is read once, together with others, each in a row of its own; continuations of
    several tokens then go on from it, again as rows. Without windows each row is both.
    """
    pairs = list(dict.fromkeys(asked))
    if context.windows is None:
        found = dict(_read_whole(decoder, context, pairs))
    elif context.method.selection is None:
        found = dict(_read_once(decoder, context, pairs))
    else:
        found = {}
        # Which windows are read depends on the question, so each one reads its own.
        for question in dict.fromkeys(question for question, _ in pairs):
            own = [pair for pair in pairs if pair[0] == question]
            found |= _read_once(decoder, decoder.narrowed(context, question), own)
    return [found[pair] for pair in asked]


def _read_whole(
    decoder: Decoder, context: EncodedContext, pairs: Sequence[Pair]
) -> Iterator[tuple[Pair, Likelihood]]:
    readers: dict[Ids, list[Pair]] = {}
    for question, answer in pairs:
        readers.setdefault((*question, *answer[:-1]), []).append((question, answer))
    rows = list(readers)
    starts = [min(len(question) for question, _ in readers[row]) - 1 for row in rows]
    for chunk in _passes(decoder, context, rows, starts):
        first = min(starts[index] for index in chunk)
        ids = _padded([rows[index] for index in chunk])
        logits = decoder.forward(context, ids, last=ids.shape[1] - first)
        for row, index in zip(logits, chunk, strict=True):
            for question, answer in readers[rows[index]]:
                (found,) = _judged(row[None, len(question) - 1 - first :], [answer])
                yield (question, answer), found


def _read_once(
    decoder: Decoder, context: EncodedContext, pairs: Sequence[Pair]
) -> Iterator[tuple[Pair, Likelihood]]:
    answers: dict[Ids, list[Ids]] = {}
    for question, answer in pairs:
        answers.setdefault(question, []).append(answer)
    questions = list(answers)
    for chunk in _passes(decoder, context, questions, [len(ids) - 1 for ids in questions]):
        rows = [questions[index] for index in chunk]
        least, ids = min(map(len, rows)), _padded(rows)
        cache = context.new_cache(len(rows))
        logits = decoder.forward(context, ids, cache, last=ids.shape[1] - least + 1)
        ends = logits[range(len(rows)), [len(row) - least for row in rows]].float()
        asked = [(place, answer) for place, row in enumerate(rows) for answer in answers[row]]
        tokens = [answer[0] for _, answer in asked]
        sums = ends.log_softmax(dim=-1)[[place for place, _ in asked], tokens].tolist()
        likeliest = ends.argmax(dim=-1).tolist()
        begun = {
            (place, answer): Likelihood(logprob, likeliest[place] == answer[0])
            for (place, answer), logprob in zip(asked, sums, strict=True)
        }
        for length in sorted(set(map(len, rows))):
            # What follows must stand behind the last token, so the padding is cut off before.
            more = [one for one in asked if len(rows[one[0]]) == length and len(one[1]) > 1]
            behind = [answer[:-1] for _, answer in more]
            for part in _passes(decoder, context, behind, [0] * len(more), before=length):
                kept = copy.deepcopy(cache)
                kept.batch_select_indices(torch.tensor([more[index][0] for index in part]))
                if length < ids.shape[1]:
                    kept.crop(length - ids.shape[1])
                inputs = _padded([behind[index] for index in part])
                logits = decoder.forward(context, inputs, kept, past=length)
                rest = _judged(logits, [more[index][1][1:] for index in part])
                for index, then in zip(part, rest, strict=True):
                    first = begun[more[index]]
                    begun[more[index]] = Likelihood(
                        first.logprob + then.logprob, first.greedy and then.greedy
                    )
        for (place, answer), found in begun.items():
            yield (rows[place], answer), found


def _passes(
    decoder: Decoder,
    context: EncodedContext,
    rows: Sequence[Ids],
    starts: Sequence[int],
    before: int = 0,
) -> Iterator[list[int]]:
    """Indices of rows of like length, as many in a pass as tokens, logits and windows allow.

    Logits are needed of each row from its start on; ``before`` it, so many tokens were read.
    """
    windows, prefix = context.windows, len(context.prefix_ids) + before
    rows_each = windows.per_query if isinstance(windows, Members) else 1
    for bucket in bucket_by_length([len(row) for row in rows], MAX_ROW_TOKENS):
        longest = len(rows[bucket[0]])
        logits = (longest - min(starts[index] for index in bucket)) * decoder.vocabulary
        seen = longest * max(1, context.window_tokens // rows_each)
        size = min(MAX_ROW_TOKENS // (prefix + longest), MAX_VALUES // max(logits, seen))
        size = max(1, size // rows_each)
        for first in range(0, len(bucket), size):
            yield bucket[first : first + size]


def bucket_by_length(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Indices of rows grouped by like length, to be padded to the longest, longest first.

    In every bucket each row is at most ``max(FREE_PADDING, MAX_PADDING * longest)`` tokens shorter
    than the longest, and rows x longest is at most ``max_tokens``; a longer row is alone.
    """
    buckets: list[list[int]] = []
    longest = 0
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        fits = (
            bool(buckets)
            and longest - lengths[index] <= max(FREE_PADDING, MAX_PADDING * longest)
            and (len(buckets[-1]) + 1) * longest <= max_tokens
        )
        if fits:
            buckets[-1].append(index)
        else:
            buckets.append([index])
            longest = lengths[index]
    return buckets


def _judged(logits: torch.Tensor, answers: Sequence[Ids]) -> list[Likelihood]:
    """Of one answer a row, from the logits of its tokens, (rows, at least their number, all)."""
    target = _padded(answers).to(logits.device)
    scores = logits[:, : target.shape[1]].float().log_softmax(dim=-1)
    found = scores.gather(2, target.unsqueeze(2)).squeeze(2)
    lengths = torch.tensor([len(ids) for ids in answers], device=logits.device)
    padding = torch.arange(target.shape[1], device=logits.device) >= lengths.unsqueeze(1)
    sums = found.masked_fill(padding, 0.0).sum(dim=1).tolist()
    greedy = ((scores.argmax(dim=-1) == target) | padding).all(dim=1).tolist()
    return list(map(Likelihood, sums, greedy))


def _padded(lists: Sequence[Ids]) -> torch.Tensor:
    rows = torch.zeros(len(lists), max(map(len, lists)), dtype=torch.int64)
    for row, ids in zip(rows, lists, strict=True):
        row[: len(ids)] = torch.tensor(ids)
    return rows
