"""Teacher forcing: the distributions at every token of given answers, in one forward pass."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rag_windows.context import EncodedContext
from rag_windows.generate import Decoder


def forced_logprobs(
    decoder: Decoder,
    context: EncodedContext,
    query_ids: Sequence[int],
    answers: Sequence[Sequence[int]],
) -> list[torch.Tensor]:
    """Next-token distributions along answers.

    Args:
        decoder: of the model.
        context: what the query reads, under its method.
        query_ids: at least one token.
        answers: token ids, at least one each.

    Returns:
        For each answer (tokens, vocabulary) log-probabilities, fp32: row ``i`` is the distribution
        from which token ``i`` would be taken after those before it.
    """
    if context.method.selection is not None:
        context = decoder.narrowed(context, query_ids)
    longest = max(len(answer) for answer in answers)
    # The last token of an answer is predicted, never read.
    rows = torch.zeros(len(answers), len(query_ids) + longest - 1, dtype=torch.int64)
    for row, answer in enumerate(answers):
        read = [*query_ids, *answer[:-1]]
        rows[row, : len(read)] = torch.tensor(read, dtype=torch.int64)
    logits = decoder.forward(context, rows, last=longest)
    return [
        logits[row, : len(answer)].float().log_softmax(dim=-1) for row, answer in enumerate(answers)
    ]
