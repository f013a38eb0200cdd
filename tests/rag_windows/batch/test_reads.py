"""All reads of a pass against one explicit softmax a token."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from rag_windows.attention.backends import forced, native
from rag_windows.attention.native.calling import call
from rag_windows.attention.native.items import Items
from rag_windows.batch import reads as module
from rag_windows.batch.ask import Ask, Part
from rag_windows.batch.read import Read
from rag_windows.batch.reads import Reads
from rag_windows.batch.scratch import Scratch
from rag_windows.batch.sight import Sight
from rag_windows.batch.slots import Slot
from rag_windows.batch.stacks import Stack
from rag_windows.windows import Window

KV_HEADS, HEADS, DIM, TOKENS = 2, 4, 16, 23
SCALE, SOFTCAP, START = 0.4, 4.0, 5
NOTHING = torch.zeros(0, dtype=torch.int64)
# Tokens of each read, its temperature, its windows' lengths, and whether they stand apart. The last
# token but one reads nothing, some read one stack, some three; two reads have more than few tokens.
ASKED: tuple[tuple[list[int], float, tuple[int, ...], bool], ...] = (
    ([4], 1.0, (30, 17, 9), True),
    (list(range(3, 19)), 0.9, (25, 40), True),
    ([2, 3], 0.7, (33, 300), True),
    (list(range(10)), 1.0, (51,), False),
    ([1, 0, 22], 0.9, (8, 8, 12), False),
    ([20, 19], 1.0, (70, 20), True),
)


def drawn(*size: int, seed: int) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


def read_of(tokens: list[int], heat: float, lengths: tuple[int, ...], apart: bool) -> Read:
    slots = []
    for seed, length in enumerate(lengths):
        key, value = (drawn(KV_HEADS, length, DIM, seed=seed + s) for s in (10 * length, 20))
        slots.append(Slot(Window((seed,) * length, START, (key,), (value,))))
    place = torch.tensor(tokens)
    return Read(Stack(slots, apart=apart), heat, [0], place, NOTHING, [])


def expected(ask: Ask, reads: list[Read], positions: torch.Tensor) -> Part:
    """In fp64, over the concatenation of all that a token reads."""
    output = torch.zeros(TOKENS, HEADS, DIM, dtype=torch.float64)
    lse = torch.full((TOKENS, HEADS), -torch.inf, dtype=torch.float64)
    for token in range(TOKENS):
        logits, values = [], []
        for read in reads:
            if token not in read.tokens.tolist():
                continue
            key, value = (one.double() for one in read.stack.joined(0, Scratch()))
            key, value = (one.repeat_interleave(HEADS // KV_HEADS, 0) for one in (key, value))
            scores = (key @ ask.query[token].double().unsqueeze(-1)).squeeze(-1) * SCALE
            if ask.softcap is not None:
                scores = torch.tanh(scores / ask.softcap) * ask.softcap
            scores = scores / read.temperature
            if ask.reach is not None:
                far = positions[token] - read.stack.positions >= ask.reach
                scores = scores.masked_fill(far, -torch.inf)
            logits.append(scores)
            values.append(value)
        if not logits:
            continue
        scores, value = torch.cat(logits, dim=1), torch.cat(values, dim=1)
        lse[token] = scores.logsumexp(dim=1)
        if lse[token].isfinite().all():
            output[token] = (scores.softmax(dim=1).unsqueeze(-1) * value).sum(dim=1)
    return output, lse


@pytest.mark.parametrize("name", [None, "cpu", "reference"])
@pytest.mark.parametrize("softcap", [None, SOFTCAP])
@pytest.mark.parametrize("reach", [None, 290, 60, 30])
def test_one_softmax_over_all_that_a_token_reads(
    reach: int | None, softcap: float | None, name: str | None
) -> None:
    reads = [read_of(*asked) for asked in ASKED]
    positions = torch.arange(TOKENS) + 60
    query = drawn(TOKENS, HEADS, DIM, seed=1)
    ask = Ask(0, query, SCALE, softcap, reach, Sight(positions), Scratch())
    right, right_lse = expected(ask, reads, positions)
    with nullcontext() if name is None else forced(name):
        output, lse = Reads(reads, TOKENS).attend(ask)
    torch.testing.assert_close(lse.double(), right_lse, rtol=0, atol=2e-5)
    seen = right_lse.isfinite().unsqueeze(-1)
    assert bool(seen.any())
    assert not bool(seen.all())
    torch.testing.assert_close(output.double() * seen, right, rtol=0, atol=2e-5)


def test_one_read_a_token_in_any_order() -> None:
    chosen = [ASKED[4], ASKED[5], ([3, 2], 1.0, (12,), False)]
    reads = [read_of(*asked) for asked in chosen]
    positions = torch.arange(TOKENS) + 60
    query = drawn(TOKENS, HEADS, DIM, seed=1)
    ask = Ask(0, query, SCALE, None, None, Sight(positions), Scratch())
    output, lse = Reads(reads, TOKENS).attend(ask)
    right, right_lse = expected(ask, reads, positions)
    torch.testing.assert_close(lse.double(), right_lse, rtol=0, atol=2e-5)
    torch.testing.assert_close(output.double(), right, rtol=0, atol=2e-5)


@pytest.mark.skipif(
    not native.available(torch.float32, DIM, DIM), reason="there is no compiler on this machine"
)
@pytest.mark.parametrize(("rows", "others"), [(8.0, [16, 10]), (torch.inf, [])])
def test_reads_that_the_kernel_takes_are_one_call(
    rows: float, others: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    alone: list[int] = []

    def counted(items: Items, query: torch.Tensor) -> Part:
        asked.append(len(items.order))
        made.add(id(items))
        return call(items, query)

    read = Ask.read

    def read_alone(self: Ask, one: Read) -> Part:
        alone.append(len(one.tokens))
        return read(self, one)

    made: set[int] = set()
    monkeypatch.setattr(native, "most_rows", lambda *_: rows)
    monkeypatch.setattr(module, "call", counted)
    monkeypatch.setattr(Ask, "read", read_alone)
    reads = Reads([read_of(*asked) for asked in ASKED], TOKENS)
    for step in range(3):
        query = drawn(TOKENS, HEADS, DIM, seed=step)
        reads.attend(Ask(0, query, SCALE, None, None, Sight(torch.arange(TOKENS)), Scratch()))
    assert asked == [sum(len(tokens) for tokens, *_ in ASKED) - sum(others)] * 3
    assert alone == others * 3
    assert len(made) == 1, "made once, asked at every step"


def test_what_one_row_overflows_does_not_reach_another() -> None:
    reads = [read_of(*asked) for asked in ASKED]
    positions = torch.arange(TOKENS) + 60
    query = drawn(TOKENS, HEADS, DIM, seed=1)
    query[4] = torch.nan
    ask = Ask(0, query, SCALE, None, None, Sight(positions), Scratch())
    output, lse = Reads(reads, TOKENS).attend(ask)
    others = torch.arange(TOKENS) != 4
    assert bool(output[others].isfinite().all())
    assert not bool(lse[others].isnan().any())
    assert bool(output[4].isnan().all())
