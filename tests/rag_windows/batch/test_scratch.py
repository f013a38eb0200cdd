"""Joining for a moment."""

from __future__ import annotations

import torch

from rag_windows.batch.scratch import Kind, Scratch


def drawn(*tokens: int, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(2, n, 3, generator=generator) for n in tokens]


def test_joins_use_the_same_memory_again() -> None:
    scratch = Scratch()
    many = drawn(4, 1, 7)
    first = scratch.joined(Kind.KEYS, many)
    assert torch.equal(first, torch.cat(many, dim=1))
    few = drawn(2, 3, seed=1)
    again = scratch.joined(Kind.KEYS, few)
    assert torch.equal(again, torch.cat(few, dim=1))
    assert again.data_ptr() == first.data_ptr()
    more = drawn(20, 3, seed=2)
    assert torch.equal(scratch.joined(Kind.KEYS, more), torch.cat(more, dim=1))


def test_keys_and_values_do_not_meet() -> None:
    scratch = Scratch()
    keys, values = drawn(4, 5), drawn(4, 5, seed=1)
    held = scratch.joined(Kind.KEYS, keys)
    scratch.joined(Kind.VALUES, values)
    scratch.joined(Kind.KEYS, [one.double() for one in values])
    assert torch.equal(held, torch.cat(keys, dim=1))


def test_one_is_not_copied() -> None:
    only = drawn(5)
    assert Scratch().joined(Kind.KEYS, only) is only[0]
