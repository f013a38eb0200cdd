"""Which windows are put side by side, and which stay where they are."""

from __future__ import annotations

from typing import cast

import pytest
import torch

from rag_windows.attention.backends import forced, native
from rag_windows.batch.row import Row
from rag_windows.batch.scratch import Scratch
from rag_windows.batch.slots import Slot
from rag_windows.batch.stacks import Stack, stacked
from rag_windows.cache.block import in_one_block
from rag_windows.shelf import Shelf
from rag_windows.windows import Window

LAYERS, KV_HEADS, HEADS, DIM = 2, 2, 4, 16
LENGTHS = (40, 25, 61, 30)
FEW = 3


@pytest.fixture(autouse=True)
def kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where there is one: what is tested here is not what it computes."""
    monkeypatch.setattr(native, "reads", lambda *_: True)
    rows = FEW * HEADS // KV_HEADS
    monkeypatch.setattr(native, "most_rows", lambda *_: rows)


def window(length: int, seed: int) -> Window:
    """In one block of its own, as a cache keeps it."""
    generator = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(KV_HEADS, length, DIM, generator=generator) for _ in range(2 * LAYERS)]
    block = in_one_block(tensors, torch.device("cpu"))
    return Window((seed,) * length, 3, block[:LAYERS], block[LAYERS:])


def slots_of(readers: int, windows: list[Window] | None = None) -> list[Slot]:
    made = [Slot(one) for one in windows or [window(n, i) for i, n in enumerate(LENGTHS)]]
    for slot in made:
        slot.readers |= {cast(Row, ("row", i)) for i in range(readers)}
    return made


def addresses(windows: list[Window]) -> list[int]:
    return [t.data_ptr() for one in windows for t in (*one.keys, *one.values)]


def check(stack: Stack, windows: list[Window]) -> None:
    """It reads all tokens of all windows, in order."""
    scratch = Scratch()
    for layer in range(LAYERS):
        key, value = stack.joined(layer, scratch)
        assert torch.equal(key, torch.cat([one.keys[layer] for one in windows], dim=1))
        assert torch.equal(value, torch.cat([one.values[layer] for one in windows], dim=1))


@pytest.mark.parametrize("readers", [1, 2, FEW, FEW + 1])
def test_few_readers_read_cached_windows_where_they_are(readers: int) -> None:
    slots = slots_of(readers)
    windows = [slot.window for slot in slots]
    before = addresses(windows)
    (stack,) = stacked([], slots, HEADS)
    assert stack.apart == (readers <= FEW)
    assert len(stack.segments[0]) == (len(LENGTHS) if stack.apart else 1)
    assert (addresses([slot.window for slot in slots]) == before) == stack.apart
    check(stack, windows)


def test_a_stack_that_too_many_read_now_is_put_side_by_side() -> None:
    slots = slots_of(1)
    windows = [slot.window for slot in slots]
    first = stacked([], slots, HEADS)
    assert stacked(first, slots, HEADS) == first
    for slot in slots:
        slot.readers |= {cast(Row, ("more", i)) for i in range(FEW)}
    (stack,) = stacked(first, slots, HEADS)
    assert not stack.apart
    check(stack, windows)
    # Once it stands so it stays.
    for slot in slots:
        slot.readers.difference_update({("more", i) for i in range(FEW)})
    assert stacked([stack], slots, HEADS) == [stack]


def test_windows_that_keep_those_of_another_row_alive_are_copied() -> None:
    shelf = Shelf([40, 500, 25])
    made = [shelf.put(i, window(n, i)) for i, n in enumerate((40, 500, 25))]
    mine = [made[0], made[2]]
    (own,) = stacked([], slots_of(1, mine), HEADS)
    assert own.apart
    shared = slots_of(2, mine)
    (stack,) = stacked([], shared, HEADS)
    assert not stack.apart
    room = made[0].keys[0].untyped_storage().data_ptr()
    assert all(slot.window.keys[0].untyped_storage().data_ptr() != room for slot in shared)
    check(stack, mine)


def test_windows_that_stand_side_by_side_are_one_segment() -> None:
    shelf = Shelf(LENGTHS)
    made = [shelf.put(i, window(n, i)) for i, n in enumerate(LENGTHS)]
    order = [made[0], made[1], made[3], made[2]]
    (stack,) = stacked([], slots_of(1, order), HEADS)
    lengths = [[key.shape[1] for key, _ in segments] for segments in stack.segments]
    assert lengths == [[65, 30, 61]] * LAYERS
    assert stack.segments[0][0][0].data_ptr() == made[0].keys[0].data_ptr()
    check(stack, order)


@pytest.mark.parametrize("why", ["dtype", "forced"])
def test_without_a_kernel_they_are_put_side_by_side(
    why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    slots = slots_of(1)
    if why == "dtype":
        monkeypatch.setattr(native, "reads", lambda dtype, *_: dtype != torch.float32)
        (stack,) = stacked([], slots, HEADS)
    else:
        with forced("cpu"):
            (stack,) = stacked([], slots, HEADS)
    assert not stack.apart
    assert [len(segments) for segments in stack.segments] == [1] * LAYERS


def test_more_heads_than_the_kernel_takes_leave_nothing_apart() -> None:
    heads = (FEW * HEADS + 1) * KV_HEADS
    (stack,) = stacked([], slots_of(1), heads)
    assert not stack.apart
