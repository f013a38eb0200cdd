"""The one attention function, against a dense float64 softmax over all that each token sees."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rag_windows.attention import backends
from rag_windows.attention.merge import Rescaling, Role
from rag_windows.attention.native import kernel as native
from rag_windows.attention.segments import Queries, Reading, Rows, Segment, Segments, read
from rag_windows.attention.weights import segment_weights

from . import stand_in

HEADS, KV_HEADS, DIM = 4, 2, 16
NUMBERS = [(1.0, 0.0, 0.0), (0.8, 0.0, 0.0), (0.9, -0.4, 1.1)]
"""Slope and shift of the context, and what is added to the query."""
BACKENDS = ["reference", "cpu", "native", "cuda"]


def draw(*size: int, seed: int) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@dataclass
class Block:
    """A segment of one group, which some tokens read."""

    role: Role
    tokens: list[int]
    first: int
    length: int
    temperature: float = 1.0
    causal: bool = False
    parts: int = 1

    @property
    def keys(self) -> Tensor:
        return draw(KV_HEADS, self.length, DIM, seed=10 * self.first)

    @property
    def values(self) -> Tensor:
        return draw(KV_HEADS, self.length, DIM, seed=10 * self.first + 1)

    @property
    def sees(self) -> Tensor:
        """(tokens, keys) bool."""
        every = torch.ones(len(self.tokens), self.length, dtype=torch.bool)
        return every.tril() if self.causal else every


@st.composite
def blocks(draw_: st.DrawFn, tokens: int) -> list[Block]:
    """What each token reads; every token sees itself, in the query."""
    made = [Block("query", list(range(tokens)), 20, tokens, causal=True)]
    for number in range(draw_(st.integers(0, 4))):
        role: Role = draw_(st.sampled_from(["prefix", "context"]))
        readers = draw_(st.lists(st.integers(0, tokens - 1), min_size=1, unique=True))
        keys = draw_(st.integers(1, 7))
        heat = 0.7 if role == "context" and number % 2 else 1.0
        parts = draw_(st.integers(1, min(3, keys)))
        made.append(Block(role, sorted(readers), number, keys, heat, parts=parts))
    return made


def segments(given_: Sequence[Block], tokens: int, dtype: torch.dtype) -> list[Segments]:
    """Those of the context and the prefix are asked together, the query by itself."""
    made: dict[bool, list[Segment]] = {False: [], True: []}
    for role in ("context", "prefix", "query"):
        for one in given_:
            if one.role == role:
                segment = Segment(
                    role,
                    one.first,
                    one.first + one.length - 1,
                    tokens=torch.tensor(one.tokens),
                    seen="causal" if one.causal else None,
                    temperature=one.temperature,
                    layers={0: _parts(one, dtype)},
                )
                made[role == "query"].append(segment)
    return [Segments(own, tokens) for own in made.values() if own]


def _parts(one: Block, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    keys = one.keys.to(dtype).unsqueeze(0).tensor_split(one.parts, dim=2)
    values = one.values.to(dtype).unsqueeze(0).tensor_split(one.parts, dim=2)
    return list(zip(keys, values, strict=True))


def dense(
    given_: Sequence[Block],
    query: Tensor,
    positions: Tensor,
    reach: int | None,
    slope: float,
    shift: float,
    bias: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> tuple[Tensor, list[Tensor]]:
    """Output (tokens, heads, dim); of each block, in `_ordered`, what each token gives to each part
    (tokens, parts), averaged over heads and without the sink."""
    outputs = []
    shares = [torch.zeros(len(query), one.parts, dtype=torch.float64) for one in given_]
    for token in range(len(query)):
        logits, values, roles = [], [], []
        for one in given_:
            if token not in one.tokens:
                continue
            near = one.sees[one.tokens.index(token)]
            at = one.first + torch.arange(one.length)
            if reach is not None:
                near = near & (positions[token] - at < reach)
            keys = one.keys.repeat_interleave(HEADS // KV_HEADS, dim=0)
            found = torch.einsum("hd,hnd->hn", query[token], keys) * 0.3
            if softcap is not None:
                found = softcap * torch.tanh(found / softcap)
            logits.append((found / one.temperature).masked_fill(~near, -torch.inf))
            values.append(one.values.repeat_interleave(HEADS // KV_HEADS, dim=0))
            roles += [one.role] * keys.shape[1]
        whole, value = torch.cat(logits, dim=1), torch.cat(values, dim=1)
        of = {role: torch.tensor([one == role for one in roles]) for role in set(roles)}
        if "context" in of:
            inside = whole.masked_fill(~of["context"], -torch.inf)
            lse = inside.logsumexp(-1, keepdim=True)
            moved = torch.where(lse.isinf(), 0.0, slope * lse + shift - lse.nan_to_num(neginf=0.0))
            whole = torch.where(of["context"], whole + moved, whole)
        whole = torch.where(of["query"], whole + bias, whole)
        text = whole.softmax(-1)
        sink = () if sinks is None else (sinks.unsqueeze(-1),)
        weights = torch.cat([whole, *sink], dim=1).softmax(-1)[:, : whole.shape[1]]
        outputs.append(torch.einsum("hn,hnd->hd", weights, value))
        first = 0
        for one, share in zip(given_, shares, strict=True):
            if token in one.tokens:
                own = text[:, first : first + one.length].mean(dim=0)
                first += one.length
                split = own.tensor_split(one.parts)
                share[token] = torch.stack([part.sum() for part in split])
    return torch.stack(outputs), shares


def _ordered(given_: Sequence[Block]) -> list[Block]:
    roles = ("context", "prefix", "query")
    return sorted(given_, key=lambda one: roles.index(one.role))


@pytest.mark.parametrize("backend", BACKENDS)
@given(data=st.data())
def test_it_is_the_softmax_over_all_that_a_token_sees(backend: str, data: st.DataObject) -> None:
    tokens = data.draw(st.integers(1, 5))
    given_ = _ordered(data.draw(blocks(tokens)))
    reach = data.draw(st.sampled_from([None, 3, 24]))
    softcap = data.draw(st.sampled_from([None, 1.5]))
    slope, shift, bias = data.draw(st.sampled_from(NUMBERS))
    sinks = draw(HEADS, seed=77) if data.draw(st.booleans()) else None
    query, positions = draw(tokens, HEADS, DIM, seed=3), torch.arange(20, 20 + tokens)
    expected, shares = dense(given_, query, positions, reach, slope, shift, bias, softcap, sinks)
    dtype, most = torch.float32, data.draw(st.sampled_from([2**25, 12]))
    reading = Reading(
        Rows(positions), segments(given_, tokens, dtype), Rescaling(slope, shift, bias)
    )
    with stand_in.forced(backend), pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "LEAST_KEYS", 1)
        patch.setattr(native, "LEAST_TOKENS", 1)
        patch.setattr(backends, "MAX_MASK", most)
        for wanted in (False, True):
            asked = Queries(0, query.to(dtype), reading.rows, 0.3, softcap, reach)
            sink = None if sinks is None else sinks.to(dtype)
            output, weights = read(reading, asked, sink, weights=wanted)
            torch.testing.assert_close(output.double(), expected, rtol=0, atol=1e-5)
    assert weights is not None
    for block, one, share in zip(given_, segment_weights([weights]), shares, strict=True):
        assert one.role == block.role
        found = one.summed().T.double()
        torch.testing.assert_close(found, share[block.tokens], rtol=0, atol=1e-5)


@pytest.mark.parametrize("reach", [None, 3])
@pytest.mark.parametrize("backend", BACKENDS)
def test_groups_of_one_token_that_see_their_own_beginnings(backend: str, reach: int | None) -> None:
    """As the rows of a batch do with KV caches of unlike lengths."""
    lengths = torch.tensor([3, 7, 1])
    keys, values = draw(3, KV_HEADS, 8, DIM, seed=1), draw(3, KV_HEADS, 8, DIM, seed=2)
    query, positions = draw(3, HEADS, DIM, seed=3), torch.tensor([30, 12, 9])
    segment = Segment(
        "query",
        first=5,
        last=30,
        tokens=torch.arange(3),
        positions=(positions - lengths + 1).unsqueeze(-1) + torch.arange(8),
        seen=lengths,
        layers={0: [(keys.float(), values.float())]},
    )
    reading = Reading(Rows(positions), [Segments([segment], 3)])
    with stand_in.forced(backend):
        asked = Queries(0, query.float(), reading.rows, 0.3, sliding_window=reach)
        output, _ = read(reading, asked)
    for row, length in enumerate(lengths.tolist()):
        first = 0 if reach is None else max(0, length - reach)
        key = keys[row, :, first:length].repeat_interleave(2, dim=0)
        value = values[row, :, first:length].repeat_interleave(2, dim=0)
        weights = (torch.einsum("hd,hnd->hn", query[row], key) * 0.3).softmax(-1)
        expected = torch.einsum("hn,hnd->hd", weights, value)
        torch.testing.assert_close(output[row].double(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("sink", [None, 0.5])
def test_segments_of_which_a_token_sees_nothing_give_zeros(sink: float | None) -> None:
    """Never NaN, with weights or without."""
    far = Segment("prefix", 0, 1, layers={0: [(torch.ones(1, 1, 2, 4), torch.ones(1, 1, 2, 4))]})
    other = Segment("context", 0, 1, layers=far.layers)
    made = [Segments([far], 1), Segments([other], 1)]
    reading = Reading(Rows(torch.tensor([50])), made, Rescaling(0.5, 1.0))
    sinks = None if sink is None else torch.full((1,), sink)
    asked = Queries(0, torch.ones(1, 1, 4), reading.rows, 1.0, sliding_window=2)
    output, weights = read(reading, asked, sinks, weights=True)
    assert weights is not None
    assert output.tolist() == [[[0.0] * 4]]
    assert all(one.summed().tolist() == [[0.0]] for one in segment_weights([weights]))


@pytest.mark.parametrize("logit", [torch.inf, torch.nan])
def test_numbers_that_are_none_are_not_hidden(logit: float) -> None:
    """A model whose keys overflow must not seem to read nothing."""
    good, bad = torch.ones(1, 1, 2, 4), torch.full((1, 1, 2, 4), logit)
    made = [
        Segments([Segment("context", 0, 1, layers={0: [(bad, good)]})], 1),
        Segments([Segment("query", 2, 3, layers={0: [(good, good)]})], 1),
    ]
    reading = Reading(Rows(torch.tensor([3])), made)
    # PyTorch's fused CPU attention itself answers keys that are NaN with zeros.
    with stand_in.forced("reference"):
        asked = Queries(0, torch.ones(1, 1, 4), reading.rows, 1.0)
        output, weights = read(reading, asked, weights=True)
    assert weights is not None
    assert bool(output.isnan().all())
    assert bool(weights.shares.isnan().any())


def test_far_apart_segments_and_half_precision_merge_in_float32() -> None:
    """A thousand equal segments of bf16 ones merge to one; bf16 sums would stop at 256."""
    ones = torch.ones(1, 1, 1, 4, dtype=torch.bfloat16)
    near = [
        Segment("context", 0, 0, torch.tensor([0]), layers={0: [(ones, ones)]}) for _ in range(1000)
    ]
    loud = Segment("query", 0, 0, layers={0: [(ones * -300, ones * 0)]})
    made = [Segments(near, 1), Segments([loud], 1)]
    reading = Reading(Rows(torch.tensor([0])), made)
    output, _ = read(reading, Queries(0, ones[0], reading.rows, 1.0))
    assert output.dtype == torch.bfloat16
    assert output.tolist() == [[[1.0] * 4]]
    assert math.isfinite(float(output.sum()))
