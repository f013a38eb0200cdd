"""The compiled kernel asked again, and by several threads."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from rag_windows.attention.native.kernel import Items, call

from .asking import KINDS, NEEDS_COMPILER, SMALL, Kind, draw, exact, reading, segment

pytestmark = NEEDS_COMPILER


def test_items_are_asked_again() -> None:
    kind = KINDS[0]
    items = Items([reading([segment(kind, 2, 50)], [1, 0])])
    queries = [draw(torch.float32, 2, 4, 16, seed=seed) for seed in range(3)]
    answers = [call(items, query) for query in [*queries, *queries]]
    for (output, lse), (again, lse_again) in zip(answers[:3], answers[3:], strict=True):
        assert torch.equal(output, again)
        assert torch.equal(lse, lse_again)
    assert not torch.equal(answers[0][0], answers[1][0])


def test_items_keep_what_they_point_at() -> None:
    kind = KINDS[0]
    query = draw(torch.float32, 1, 2, 16)
    items = Items([reading([segment(kind, 2, 5000)])])
    expected = exact([reading([segment(kind, 2, 5000)])], query)[1]
    # What would have been freed is taken again.
    others = [torch.full((2, 5000, 16), torch.nan) for _ in range(4)]
    torch.testing.assert_close(call(items, query)[1].double(), expected, atol=1e-5, rtol=0)
    assert len(others) == 4


@pytest.mark.parametrize("kind", SMALL, ids=str)
def test_many_callers_at_once(kind: Kind) -> None:
    """Each of them with threads of its own."""
    dtype, dim, _ = kind
    query = draw(dtype, 30, 4, dim)
    shared = Items([reading([segment(kind, 2, 900)], range(30))])
    own = [Items([reading([segment(kind, 2, 400 + n, seed=n)], [n])]) for n in range(8)]
    gate = threading.Barrier(8)

    def work(number: int) -> list[Tensor]:
        # A thread takes the number of the process with its first question about it.
        torch.get_num_threads()
        torch.set_num_threads(1 + number % 3)
        gate.wait(timeout=30)
        return [
            part for _ in range(20) for one in (shared, own[number]) for part in call(one, query)
        ]

    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(work, range(8)))
    for number, parts in enumerate(together):
        torch.set_num_threads(1 + number % 3)
        alone = [part for one in (shared, own[number]) for part in call(one, query)]
        assert all(torch.equal(part, alone[i % 4]) for i, part in enumerate(parts))
