"""How likely continuations are, and whether the model itself would have said them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lm_eval_rag_windows.tokens import Ids
from rag_windows import WindowedLM
from rag_windows.icl.scoring import MAX_ROW_TOKENS, MAX_VALUES
from rag_windows.kv import Members
from rag_windows.prefill import EncodedContext, bucket_by_length


@dataclass(frozen=True, slots=True)
class Continued:
    """What follows a question.

    Attributes:
        question: token ids.
        continuation: token ids, at least one.
    """

    question: Ids
    continuation: Ids

    @property
    def row(self) -> Ids:
        """What the model reads: the last token is only predicted."""
        return (*self.question, *self.continuation[:-1])


@dataclass(frozen=True, slots=True)
class Likelihood:
    """Of one continuation.

    Attributes:
        logprob: sum of its tokens' log-probabilities, in nats.
        greedy: whether each token is the likeliest one at its place.
    """

    logprob: float
    greedy: bool


@torch.no_grad()
def likelihoods(
    lm: WindowedLM, context: EncodedContext, asked: Sequence[Continued]
) -> list[Likelihood]:
    """Read questions with their continuations, each in a row of its own.

    Equal rows are read once. Where the method chooses windows for each question, only rows of one
    question share a pass.

    Args:
        lm: the model.
        context: what all of them read.
        asked: in any order.

    Returns:
        One for each, in order.
    """
    if context.method.selection is None or context.windows is None:
        return _likelihoods(lm, context, asked)
    found: dict[int, Likelihood] = {}
    for question in dict.fromkeys(one.question for one in asked):
        own = [index for index, one in enumerate(asked) if one.question == question]
        narrowed = lm.engine.decoder.narrowed(context, question)
        made = _likelihoods(lm, narrowed, [asked[index] for index in own])
        found |= dict(zip(own, made, strict=True))
    return [found[index] for index in range(len(asked))]


def _likelihoods(
    lm: WindowedLM, context: EncodedContext, asked: Sequence[Continued]
) -> list[Likelihood]:
    readers: dict[Ids, list[int]] = {}
    for index, one in enumerate(asked):
        readers.setdefault(one.row, []).append(index)
    rows = list(readers)
    starts = [min(len(asked[index].question) for index in readers[row]) - 1 for row in rows]
    found: dict[int, Likelihood] = {}
    for bucket in bucket_by_length([len(row) for row in rows], MAX_ROW_TOKENS):
        for chunk in _chunks(lm, context, bucket, rows, starts):
            longest = max(len(rows[number]) for number in chunk)
            first = min(starts[number] for number in chunk)
            ids = torch.zeros(len(chunk), longest, dtype=torch.int64)
            for place, number in enumerate(chunk):
                ids[place, : len(rows[number])] = torch.tensor(rows[number])
            logits = lm.engine.decoder.forward(context, ids, last=longest - first)
            for place, number in enumerate(chunk):
                for index in readers[rows[number]]:
                    begin = len(asked[index].question) - 1 - first
                    found[index] = _of_row(logits[place, begin:], asked[index].continuation)
    return [found[index] for index in range(len(asked))]


def _of_row(logits: torch.Tensor, continuation: Ids) -> Likelihood:
    """From the logits that predict the continuation's tokens, (at least its length, vocabulary)."""
    target = torch.tensor(continuation, device=logits.device)
    scores = logits[: len(target)].float().log_softmax(dim=-1)
    summed = scores.gather(1, target.unsqueeze(1)).sum()
    return Likelihood(float(summed), bool((scores.argmax(dim=-1) == target).all()))


def _chunks(
    lm: WindowedLM,
    context: EncodedContext,
    bucket: Sequence[int],
    rows: Sequence[Ids],
    starts: Sequence[int],
) -> list[list[int]]:
    """Rows of like length, as many in a pass as its tokens and its logits allow."""
    longest = max(len(rows[number]) for number in bucket)
    predicted = longest - min(starts[number] for number in bucket)
    windows = context.windows
    each = windows.per_query if isinstance(windows, Members) else 1
    seen = longest * max(1, context.window_tokens // each)
    values = max(predicted * lm.engine.decoder.vocabulary, seen)
    size = min(MAX_ROW_TOKENS // (len(context.prefix_ids) + longest), MAX_VALUES // values)
    size = max(1, size // each)
    return [list(bucket[i : i + size]) for i in range(0, len(bucket), size)]
