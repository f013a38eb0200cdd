"""How likely a model finds given answers behind given questions, many of both at once."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

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

T = TypeVar("T")
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
    """Log-probability of each choice's tokens after each query, in nats: a list a query."""
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
    several tokens then go on from it, again as rows.
    """
    answers: dict[Ids, dict[Ids, None]] = {}
    for question, answer in asked:
        answers.setdefault(question, {})[answer] = None
    if context.method.selection is None or context.windows is None:
        found = dict(_read(decoder, context, answers))
    else:
        found = {}
        # Which windows are read depends on the question, so each one reads its own.
        for question, own in answers.items():
            found |= _read(decoder, decoder.narrowed(context, question), {question: own})
    return [found[pair] for pair in asked]


def _read(
    decoder: Decoder, context: EncodedContext, answers: Mapping[Ids, Iterable[Ids]]
) -> Iterator[tuple[Pair, Likelihood]]:
    """Of the answers to each question."""
    for rows in _passes(decoder, context, answers, lambda question: question):
        least, ids = min(map(len, rows)), _padded(rows)
        cache = context.new_cache(len(rows))
        logits = decoder.forward(context, ids, cache, last=ids.shape[1] - least + 1)
        ends = logits[range(len(rows)), [len(row) - least for row in rows]].float()
        asked = [(place, answer) for place, row in enumerate(rows) for answer in answers[row]]
        tokens = [answer[0] for _, answer in asked]
        sums = ends.log_softmax(dim=-1)[[place for place, _ in asked], tokens].tolist()
        likeliest = ends.argmax(dim=-1).tolist()
        found = {
            (place, answer): Likelihood(logprob, likeliest[place] == answer[0])
            for (place, answer), logprob in zip(asked, sums, strict=True)
        }
        for length in sorted(set(map(len, rows))):
            more = [one for one in asked if len(rows[one[0]]) == length and len(one[1]) > 1]
            for part in _passes(decoder, context, more, lambda one: one[1][:-1], before=length):
                kept = copy.deepcopy(cache)
                kept.batch_select_indices(torch.tensor([place for place, _ in part]))
                if length < ids.shape[1]:
                    # What follows must stand behind the last token, so padding is cut off before.
                    kept.crop(length - ids.shape[1])
                inputs = _padded([answer[:-1] for _, answer in part])
                logits = decoder.forward(context, inputs, kept, past=length)
                for one, rest in zip(
                    part, _judged(logits, [one[1][1:] for one in part]), strict=True
                ):
                    logprob, greedy = found[one].logprob, found[one].greedy
                    found[one] = Likelihood(logprob + rest.logprob, greedy and rest.greedy)
        for (place, answer), likelihood in found.items():
            yield (rows[place], answer), likelihood


def _passes(
    decoder: Decoder,
    context: EncodedContext,
    items: Iterable[T],
    ids_of: Callable[[T], Ids],
    before: int = 0,
) -> Iterator[list[T]]:
    """Rows of like length, longest first, as many in a pass as tokens and logits allow."""
    windows, prefix = context.windows, len(context.prefix_ids) + before
    rows_each = windows.per_query if isinstance(windows, Members) else 1
    chunk: list[T] = []
    longest = most = 0
    for item in sorted(items, key=lambda one: -len(ids_of(one))):
        padding = int(max(FREE_PADDING, MAX_PADDING * longest))
        if chunk and (longest - len(ids_of(item)) > padding or len(chunk) == most):
            yield chunk
            chunk = []
        if not chunk:
            longest = len(ids_of(item))
            padding = int(max(FREE_PADDING, MAX_PADDING * longest))
            predicted = longest if before else padding + 1
            seen = longest * (context.window_tokens // rows_each)
            values = max(1, predicted * decoder.vocabulary, seen)
            most = min(MAX_ROW_TOKENS // (prefix + longest), MAX_VALUES // values) // rows_each
            most = max(1, most)
        chunk.append(item)
    if chunk:
        yield chunk


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
