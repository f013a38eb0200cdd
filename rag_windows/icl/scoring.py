"""How likely a model finds given answers behind given questions, many of both at once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from rag_windows.generate import Decoder
from rag_windows.kv import Members
from rag_windows.prefill import EncodedContext

MAX_ROW_TOKENS = 8192
"""Tokens, prefix and padding included, that the rows of one pass hold at most."""

MAX_VALUES = 2**26
"""Logits that one pass gives at most; and pairs of a token and a windows' token that it sees."""

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
    """Of one continuation: the sum of its tokens' log-probabilities, in nats.

    It is `greedy` if each token is the likeliest one at its place.
    """

    logprob: float
    greedy: bool


@torch.no_grad()
def likelihoods(
    decoder: Decoder, context: EncodedContext, asked: Sequence[Pair]
) -> list[Likelihood]:
    """How likely continuations are behind questions, both of at least one token, in order."""
    if not context.waits:
        found = dict(_read(decoder, context, asked))
    else:
        found = {}
        # What is read depends on the question, so each one reads its own.
        for question in dict.fromkeys(question for question, _ in asked):
            own = [pair for pair in asked if pair[0] == question]
            found |= _read(decoder, decoder.for_query(context, question), own)
    return [found[pair] for pair in asked]


def _read(
    decoder: Decoder, context: EncodedContext, asked: Iterable[Pair]
) -> Iterator[tuple[Pair, Likelihood]]:
    """Each distinct pair and its likelihood; the last token of an answer is never read."""
    pairs_of: dict[Ids, list[Pair]] = {}
    for question, answer in dict.fromkeys(asked):
        pairs_of.setdefault(question + answer[:-1], []).append((question, answer))
    for row, longer in pairwise(sorted(pairs_of)):
        if longer[: len(row)] == row:
            # Reading the longer one reads this one, too.
            pairs_of[longer] += pairs_of.pop(row)
    starts = {row: min(len(q) for q, _ in pairs) - 1 for row, pairs in pairs_of.items()}
    for rows in _passes(decoder, context, starts):
        ids = torch.zeros(len(rows), len(rows[0]), dtype=torch.int64)
        for place, row in enumerate(rows):
            ids[place, : len(row)] = torch.tensor(row)
        start = min(starts[row] for row in rows)
        logits = decoder.forward(context, ids, last=ids.shape[1] - start)
        for own, row in zip(logits, rows, strict=True):
            scores = own.float().log_softmax(dim=-1)
            for question, answer in pairs_of[row]:
                first = len(question) - 1 - start
                behind = scores[first : first + len(answer)]
                total = behind[range(len(answer)), list(answer)].sum()
                greedy = behind.argmax(dim=-1).tolist() == list(answer)
                yield (question, answer), Likelihood(float(total), greedy)


def _passes(
    decoder: Decoder, context: EncodedContext, starts: dict[Ids, int]
) -> Iterator[list[Ids]]:
    """Rows of like length, longest first, as many in a pass as tokens and logits allow.

    Logits of a row are needed from its start on.
    """
    rows_each = context.windows.per_query if isinstance(context.windows, Members) else 1
    combination = context.method.combination
    one_start = combination is not None and combination.starts
    chunk: list[Ids] = []
    for row in sorted(starts, key=len, reverse=True):
        longest = len(chunk[0]) if chunk else len(row)
        start = min(starts[one] for one in (*chunk, row))
        tokens = len(context.prefix_ids) + longest
        seen = longest * (context.window_tokens // rows_each)
        values = max((longest - start) * decoder.vocabulary, seen)
        rows = (len(chunk) + 1) * rows_each
        padding = longest - len(row)
        if chunk and (
            padding > max(4, longest // 10)
            or (one_start and starts[row] != starts[chunk[0]])
            or rows * tokens > MAX_ROW_TOKENS
            or rows * values > MAX_VALUES
        ):
            yield chunk
            chunk = []
        chunk.append(row)
    if chunk:
        yield chunk
