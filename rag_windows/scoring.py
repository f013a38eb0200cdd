"""How likely a model finds given answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rag_windows.context import EncodedContext
from rag_windows.decoding import Decoder
from rag_windows.errors import InputError


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


def score_ids(
    decoder: Decoder,
    context: EncodedContext,
    query_ids: Sequence[int],
    choices: Sequence[Sequence[int]],
) -> list[float]:
    """Log-probability of each choice's tokens after the query.

    The query is read once; all choices then share one padded pass.

    Returns:
        Sums of log-probabilities in nats, fp32, one a choice.

    Raises:
        InputError: no choices, or one without tokens.
    """
    if not choices:
        raise InputError("score needs at least one choice.")
    empty = next((i for i, choice in enumerate(choices) if not choice), None)
    if empty is not None:
        raise InputError(f"Choice {empty} has no tokens; leave it out.")
    if context.windows is None:
        return [_plain(decoder, context, query_ids, choice) for choice in choices]
    tail = context.new_tail()
    query = torch.tensor([list(query_ids)], dtype=torch.int64)
    first = decoder.forward(context, query, tail)[0, -1].float().log_softmax(dim=-1)
    tail.batch_repeat_interleave(len(choices))
    longest = max(len(choice) for choice in choices)
    rows = torch.zeros(len(choices), longest, dtype=torch.int64)
    for row, choice in enumerate(choices):
        rows[row, : len(choice)] = torch.tensor(list(choice))
    logits = decoder.forward(context, rows, tail, past=len(query_ids))
    sums = []
    for row, choice in enumerate(choices):
        total = first[choice[0]]
        if len(choice) > 1:
            later = logits[row, : len(choice) - 1].float().log_softmax(dim=-1)
            target = torch.tensor(list(choice[1:]), device=later.device)
            total = total + later.gather(1, target.unsqueeze(1)).sum().to(total.device)
        sums.append(float(total))
    return sums


def _plain(
    decoder: Decoder, context: EncodedContext, query_ids: Sequence[int], choice: Sequence[int]
) -> float:
    ids = torch.tensor([[*query_ids, *choice]], dtype=torch.int64)
    logits = decoder.forward(context, ids)[0, len(query_ids) - 1 : -1].float().log_softmax(dim=-1)
    target = torch.tensor(list(choice), device=logits.device)
    return float(logits.gather(1, target.unsqueeze(1)).sum())
