"""Requests to a kernel that answers many segments at once, and the reference's answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from rag_windows.attention.backends import AttentionRequest, reference

Part = tuple[torch.Tensor, torch.Tensor]
"""Keys (groups, kv heads, keys, head dim) and values (groups, kv heads, keys, value dim)."""


@dataclass(slots=True)
class Item:
    """Groups of tokens, each of which reads keys of its own; numbers as in `backends.Request`.

    One group's keys lie in all of the parts, at least one in each. ``tokens`` (groups * M,) int64
    on the CPU are places in the query, group after group. ``between`` (groups,) int64 each, on the
    CPU, are the first key that each group reads of the only part, and the end; None for all.
    """

    parts: Sequence[Part]
    tokens: torch.Tensor
    scale: float
    softcap: float | None
    temperature: float
    causal: bool = False
    between: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def groups(self) -> int:
        """Number of groups."""
        return len(self.parts[0][0])


class Answered(NamedTuple):
    """What a kernel gives for items: a result for each token of each item, in their order.

    Attributes:
        output: (results, heads, value dim), fp32 or in the query's dtype; zero where a token sees
            no key.
        lse: (results, heads), fp32, ``-inf`` there.
        parts: if they are wanted, for each item (parts, tokens, heads) fp32: the log-sum-exp of
            each part's keys by themselves. An item of one part may have None: it is ``lse``.
    """

    output: torch.Tensor
    lse: torch.Tensor
    parts: list[torch.Tensor | None] | None


def sound(item: Item, query: torch.Tensor) -> bool:
    """Whether an item and its query (tokens, heads, head dim) are what `Item` says they are.

    Shapes fit, dtypes and devices agree, nothing is read out of bounds, no part is empty, and no
    gradient is wanted.
    """
    groups, kv_heads, length, dim = item.parts[0][0].shape
    value_dim, tokens = item.parts[0][1].shape[3], item.tokens
    if query.shape[2] != dim or query.shape[1] % kv_heads:
        return False
    if tokens.dtype != torch.int64 or not len(tokens) or len(tokens) % groups:
        return False
    if int(tokens.min()) < 0 or int(tokens.max()) >= len(query):
        return False
    if item.causal and (len(item.parts) > 1 or length != len(tokens) // groups):
        return False
    if item.between is not None:
        first, end = (one.numpy() for one in item.between)
        inside = (first >= 0).all() and (first < end).all() and (end <= length).all()
        if not (inside and len(first) == len(end) == groups and len(item.parts) == 1):
            return False
    for key, value in item.parts:
        if not (
            key.device == value.device == query.device
            and key.dtype == value.dtype == query.dtype
            and key.shape[2] > 0
            and key.shape == (groups, kv_heads, key.shape[2], dim)
            and value.shape == (groups, kv_heads, key.shape[2], value_dim)
        ):
            return False
    tensors = query, *(tensor for part in item.parts for tensor in part)
    return not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors))


def by_reference(item: Item, query: torch.Tensor) -> Answered:
    """What `backends.reference` answers to one item, with the log-sum-exp of each part."""
    every = range(len(item.parts))
    (output, lse), *per_part = (_of_parts(item, query, places) for places in [every, *zip(every)])
    return Answered(output, lse, [torch.stack([one for _, one in per_part])])


def _of_parts(
    item: Item, query: torch.Tensor, places: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sum-exp over some of the parts only."""
    made = []
    for group, tokens in enumerate(item.tokens.to(query.device).view(item.groups, -1)):
        keys = slice(None)
        if item.between is not None:
            first, end = item.between
            keys = slice(int(first[group]), int(end[group]))
        parts = [item.parts[place] for place in places]
        key, value = (
            torch.cat([one[group : group + 1, :, keys] for one in each], dim=2)
            for each in zip(*parts, strict=True)
        )
        asked = query[tokens].transpose(0, 1).unsqueeze(0)
        numbers = item.scale, item.temperature, item.softcap, item.causal
        made.append(reference(AttentionRequest(asked, key, value, *numbers)))
    output, lse = (torch.cat(each, dim=2)[0].transpose(0, 1) for each in zip(*made, strict=True))
    return output, lse


TOLERANCE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}
LSE_TOLERANCE = 3e-4


def agrees(
    answer: Callable[[list[Item], torch.Tensor], Answered],
    device: torch.device,
    dtype: torch.dtype,
    dims: tuple[int, int],
    *,
    softcap: float | None,
) -> bool:
    """Whether a kernel answers small questions as the reference does, in float64.

    They are of few and of many windows with gaps, a text that sees itself, row caches of several
    lengths, and one to 33 tokens of grouped heads; ``dims`` are those of heads and of values.
    """
    for items, query in _questions(device, dtype, dims, softcap):
        found, right = answer(items, query), [_exact(item, query) for item in items]
        output, lse = (torch.cat(each) for each in zip(*(one[:2] for one in right), strict=True))
        lses = [
            (found.lse, lse),
            *(
                (own, one.parts[0])
                for own, one in zip(found.parts or (), right, strict=True)
                if own is not None and one.parts and one.parts[0] is not None
            ),
        ]
        if not torch.allclose(found.output.float(), output.float(), atol=TOLERANCE[dtype]):
            return False
        if not all(torch.allclose(one, two, atol=LSE_TOLERANCE) for one, two in lses):
            return False
    return True


def _exact(item: Item, query: torch.Tensor) -> Answered:
    """The answer of the reference, whatever fp32 products or autocast are set to."""
    parts = [(key.double(), value.double()) for key, value in item.parts]
    output, lse, per_part = by_reference(replace(item, parts=parts), query.double())
    return Answered(
        output.float(), lse.float(), [one.float() for one in per_part or () if one is not None]
    )


def _questions(
    device: torch.device, dtype: torch.dtype, dims: tuple[int, int], softcap: float | None
) -> Iterator[tuple[list[Item], torch.Tensor]]:
    draw = torch.Generator().manual_seed(0)
    # Nobody may read what is between the windows.
    memory = [torch.full((2000, 2, dim), torch.nan, dtype=dtype, device=device) for dim in dims]

    def part(first: int, length: int, groups: int = 1) -> Part:
        own = [one[first : first + length] for one in memory]
        for one in own:
            one.copy_(torch.randn(one.shape, generator=draw, dtype=torch.float32))
        key, value = (one.unflatten(0, (groups, -1)).transpose(1, 2) for one in own)
        return key, value

    few = [part(900, 130), part(0, 1), part(3, 700)]
    many = [part(1100 + 4 * i, 1 + i % 3) for i in range(150)]
    numbers = dims[0] ** -0.5, softcap
    query = torch.randn(33, 8, dims[0], generator=draw, dtype=torch.float32).to(device, dtype)
    between = torch.tensor([0, 5]), torch.tensor([20, 9])
    yield [Item(few, torch.arange(1), *numbers, 1.0)], query
    yield [Item(many, torch.arange(1), *numbers, 0.7)], query
    yield (
        [
            Item(few, torch.arange(3), *numbers, 0.7),
            Item([part(1800, 33)], torch.arange(33), *numbers, 1.0, causal=True),
            Item([part(1840, 40, 2)], torch.tensor([5, 2]), *numbers, 1.0, between=between),
        ],
        query,
    )
