"""The tail that stands in a room, as a cache."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

from rag_windows.step.room import Room
from rag_windows.step.tail import StaticTail
from rag_windows.windows import PackedWindows
from tests.rag_windows import small


def windows() -> PackedWindows:
    packed = small.lm().encode_ids([0, 4], [[80, 81], [90]]).windows
    assert isinstance(packed, PackedWindows)
    return packed


def filled(lengths: list[int], tokens: int = 1) -> tuple[StaticTail, DynamicCache, Room]:
    room = Room(windows(), tokens)
    tail, ordinary = StaticTail(room, None), DynamicCache()
    generator = torch.Generator().manual_seed(0)
    for length in lengths:
        for layer in range(2):
            key, value = (torch.randn(1, 2, length, 12, generator=generator) for _ in range(2))
            mine, wanted = tail.update(key, value, layer), ordinary.update(key, value, layer)
            assert all(torch.equal(*pair) for pair in zip(mine, wanted, strict=True))
    return tail, ordinary, room


def test_it_reads_as_an_ordinary_cache_and_writes_in_place() -> None:
    tail, ordinary, room = filled([5, 1, 3])
    assert tail.get_seq_length() == 9
    assert tail.get_mask_sizes(2, 0) == ordinary.get_mask_sizes(2, 0)
    assert torch.equal(room.keys[1][:, :, :9], ordinary.layers[1].keys)
    assert not room.keys[1][:, :, 9:].any()


def test_a_room_that_is_too_small_grows_with_what_it_holds() -> None:
    tail, ordinary, room = filled([60, 3, 1, 1, 100])
    assert room.capacity == 256
    assert tail.get_seq_length() == 165
    assert torch.equal(room.values[0][:, :, :165], ordinary.layers[0].values)


def test_a_blind_step_writes_where_the_index_says() -> None:
    tail, _, room = filled([5])
    key = torch.ones(1, 2, 1, 12)
    room.index.fill_(7)
    with room.blindly():
        read = tail.update(key, key, 0)
    for whole, held in zip(read, (room.keys[0], room.values[0]), strict=True):
        assert whole is held
        assert torch.equal(held[:, :, 7:8], key)
        assert not held[:, :, 5:7].any()
    assert tail.get_seq_length() == 5


def crop(cache: StaticTail | DynamicCache) -> None:
    cache.crop(-2)


def repeat(cache: StaticTail | DynamicCache) -> None:
    cache.batch_repeat_interleave(3)


def select(cache: StaticTail | DynamicCache) -> None:
    cache.batch_select_indices(torch.tensor([0, 0]))


def reorder(cache: StaticTail | DynamicCache) -> None:
    cache.reorder_cache(torch.tensor([0, 0]))


@pytest.mark.parametrize("change", [crop, repeat, select, reorder])
def test_what_rearranges_it_makes_it_an_ordinary_cache(change: object) -> None:
    tail, ordinary, room = filled([5, 1])
    before = room.keys[0].clone()
    for cache in (tail, ordinary):
        change(cache)  # type: ignore[operator]  # one of the four above
    rows = ordinary.layers[0].keys.shape[0]
    key = torch.ones(rows, 2, 1, 12)
    for layer in range(2):
        mine, wanted = tail.update(key, key, layer), ordinary.update(key, key, layer)
        assert all(torch.equal(*pair) for pair in zip(mine, wanted, strict=True))
    assert not tail.placed
    assert tail.get_seq_length() == ordinary.get_seq_length()
    assert torch.equal(room.keys[0], before)
