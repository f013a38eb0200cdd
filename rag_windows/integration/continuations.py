"""How likely given token ids are behind given questions, many of both at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from rag_windows.icl.scoring import MAX_ROW_TOKENS, MAX_VALUES, bucket_by_length
from rag_windows.kv import Members
from rag_windows.model import WindowedLM
from rag_windows.prefill import EncodedContext

Ids = tuple[int, ...]


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
    lm: WindowedLM, context: EncodedContext, asked: Sequence[tuple[Ids, Ids]]
) -> list[Likelihood]:
    """Read questions with their continuations, each in a row of its own; equal rows once.

    Args:
        lm: the model.
        context: what all of them read, from `WindowedLM.encode_ids`.
        asked: ids of a question and of its continuation, at least one each.

    Returns:
        One for each, in order.
    """
    groups: dict[Ids | None, list[int]] = {None: list(range(len(asked)))}
    if context.method.selection is not None and context.windows is not None:
        # Which windows are read depends on the question, so only its own rows share a pass.
        groups = {}
        for index, (question, _) in enumerate(asked):
            groups.setdefault(question, []).append(index)
    found: dict[int, Likelihood] = {}
    for choosing, indices in groups.items():
        own = context if choosing is None else lm.engine.decoder.narrowed(context, choosing)
        readers: dict[Ids, list[int]] = {}
        for index in indices:
            question_ids, continuation = asked[index]
            readers.setdefault((*question_ids, *continuation[:-1]), []).append(index)
        # Logits are needed from the last token of the shortest question on.
        starts = {row: min(len(asked[i][0]) for i in held) - 1 for row, held in readers.items()}
        for rows, first in _passes(lm, own, starts):
            longest = max(map(len, rows))
            ids = torch.zeros(len(rows), longest, dtype=torch.int64)
            for place, row in enumerate(rows):
                ids[place, : len(row)] = torch.tensor(row)
            logits = lm.engine.decoder.forward(own, ids, last=longest - first)
            for place, row in enumerate(rows):
                for index in readers[row]:
                    question_ids, continuation = asked[index]
                    predicting = logits[place, len(question_ids) - 1 - first :]
                    found[index] = _of_row(predicting, continuation)
    return [found[index] for index in range(len(asked))]


def _passes(
    lm: WindowedLM, context: EncodedContext, starts: dict[Ids, int]
) -> Iterator[tuple[list[Ids], int]]:
    """Rows of like length, as many in a pass as tokens and logits allow, and their start."""
    rows, windows = list(starts), context.windows
    rows_each = windows.per_query if isinstance(windows, Members) else 1
    for bucket in bucket_by_length([len(row) for row in rows], MAX_ROW_TOKENS):
        longest = max(len(rows[number]) for number in bucket)
        predicted = longest - min(starts[rows[number]] for number in bucket)
        seen = longest * max(1, context.window_tokens // rows_each)
        values = max(predicted * lm.engine.decoder.vocabulary, seen)
        size = min(MAX_ROW_TOKENS // (len(context.prefix_ids) + longest), MAX_VALUES // values)
        size = max(1, size // rows_each)
        for i in range(0, len(bucket), size):
            chunk = [rows[number] for number in bucket[i : i + size]]
            yield chunk, min(starts[row] for row in chunk)


def _of_row(logits: torch.Tensor, continuation: Ids) -> Likelihood:
    """From the logits that predict the continuation's tokens, (at least its length, vocabulary)."""
    target = torch.tensor(continuation, device=logits.device)
    scores = logits[: len(target)].float().log_softmax(dim=-1)
    summed = scores.gather(1, target.unsqueeze(1)).sum()
    return Likelihood(float(summed), bool((scores.argmax(dim=-1) == target).all()))
