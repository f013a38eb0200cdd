"""Each row's newest token over its own tail."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from rag_windows.attention.backends import forced
from rag_windows.batch.tails import FIRST_ROOM, Tails

KV_HEADS, HEADS, DIM, SCALE, SOFTCAP = 2, 4, 16, 0.4, 3.0
LENGTHS = (3, 1, FIRST_ROOM - 1, 17)
STEPS = 4


def drawn(*size: int, seed: int) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", [None, "cpu", "reference"])
@pytest.mark.parametrize(("reach", "softcap"), [(None, None), (5, None), (5, SOFTCAP)])
def test_a_token_sees_its_own_row_as_far_as_it_reaches(
    reach: int | None, softcap: float | None, name: str | None
) -> None:
    tails, rows = Tails(), len(LENGTHS)
    held = [(drawn(KV_HEADS, n, DIM, seed=n), drawn(KV_HEADS, n, DIM, seed=2 * n)) for n in LENGTHS]
    tails.grow(LENGTHS)
    key, value = (torch.cat(one, dim=1) for one in zip(*held, strict=True))
    tails.fill(0, 0, LENGTHS, key, value)
    for step in range(STEPS):
        if step == 2:  # a row leaves, and the last one takes its place
            tails.remove(1)
            held[1] = held.pop()
            rows -= 1
        query, key, value = (
            drawn(n, m, DIM, seed=100 * step + i)
            for i, (n, m) in enumerate(((rows, HEADS), (KV_HEADS, rows), (KV_HEADS, rows)))
        )
        tails.grow([1] * rows)
        with nullcontext() if name is None else forced(name):
            output, lse = tails.attend(0, query, key, value, SCALE, softcap, reach)
        for row in range(rows):
            keys = torch.cat([held[row][0], key[:, row : row + 1]], dim=1)
            values = torch.cat([held[row][1], value[:, row : row + 1]], dim=1)
            held[row] = keys, values
            seen = slice(0 if reach is None else -reach, None)
            keys, values = (one[:, seen].repeat_interleave(2, 0) for one in (keys, values))
            scores = (keys @ query[row].unsqueeze(-1)).squeeze(-1) * SCALE
            if softcap is not None:
                scores = torch.tanh(scores / softcap) * softcap
            right = (scores.softmax(dim=1).unsqueeze(-1) * values).sum(dim=1)
            torch.testing.assert_close(lse[row], scores.logsumexp(dim=1), rtol=0, atol=2e-5)
            torch.testing.assert_close(output[row], right, rtol=0, atol=2e-5)
