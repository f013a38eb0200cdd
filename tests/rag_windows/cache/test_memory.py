"""The tier in memory."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from rag_windows import CacheError, InputError, NonFiniteError
from rag_windows.cache import memory
from rag_windows.cache.codec import Entry, codec_named, settle
from rag_windows.cache.memory import MemoryTier
from rag_windows.cache.transfer import block_bytes, in_one_block
from rag_windows.kv import Window
from tests.rag_windows.cache.windows import entry, key, same, window

MIB = 1 << 20


@pytest.mark.parametrize("store", ["as computed", "int8"])
def test_what_is_stored_comes_back(store: str) -> None:
    tier, original = MemoryTier(MIB, store), entry(labels=("doc 1",), cost_s=0.25)
    assert tier.put(key(1), original)
    found = tier.get_many([key(1), key(2)])
    assert list(found) == [key(1)]
    assert same(found[key(1)].window, settle(codec_named(store), original.window))
    assert replace(found[key(1)], window=original.window) == original
    assert key(1) in tier
    assert key(2) not in tier


def test_a_stored_window_keeps_no_batch_alive() -> None:
    batch = torch.randn(16, 2, 100, 6)
    cut = tuple(batch[row, :, :10] for row in (3, 4))
    before = [part.clone() for part in cut]
    tier = MemoryTier(MIB)
    tier.put(key(1), Entry(Window(tuple(range(10)), 0, cut[:1], cut[1:]), 1.0, (), 0.0))
    batch.zero_()
    kept = tier.get_many([key(1)])[key(1)].window
    assert torch.equal(kept.keys[0], before[0])
    assert torch.equal(kept.values[0], before[1])
    storages = {t.untyped_storage().data_ptr(): t for t in (*kept.keys, *kept.values)}
    assert [t.untyped_storage().nbytes() for t in storages.values()] == [1024]  # twice 480, aligned


def test_a_window_in_a_block_of_its_own_is_not_copied_again() -> None:
    made = window()
    host = torch.device("cpu")
    block = in_one_block((*made.keys, *made.values), host)
    again = in_one_block(block, host)
    assert [t.data_ptr() for t in again] == [t.data_ptr() for t in block]
    assert all(t.data_ptr() % 4 == 0 and t.is_contiguous() for t in block)
    # A part of a block would keep the rest alive.
    assert in_one_block(block[:2], host)[0].data_ptr() != block[0].data_ptr()


def test_mixed_dtypes_share_a_block() -> None:
    tensors = (torch.randn(3, 5).bfloat16(), torch.randn(2, 2), torch.arange(5, dtype=torch.int8))
    block = in_one_block(tensors, torch.device("cpu"))
    assert all(torch.equal(a, b) for a, b in zip(tensors, block, strict=True))
    assert block_bytes(block) == 3 * 64


def test_the_limit_counts_everything_held() -> None:
    rng, tier = random.Random(0), MemoryTier(64_000)
    for number in range(150):
        tier.get_many([key(rng.randrange(40))])
        tier.put(key(rng.randrange(40)), entry(rng.randint(1, 60), seed=number))
        stats = tier.stats()
        assert stats.bytes <= stats.limit_bytes == 64_000
    held = tier.get_many([key(number) for number in range(40)])
    tensors = [t for one in held.values() for t in (*one.window.keys, *one.window.values)]
    assert sum(t.nbytes for t in tensors) <= block_bytes(tensors) < tier.stats().bytes
    assert tier.stats().entries == len(held) == len(tier) > 0
    assert tier.stats().evictions > 0


@pytest.mark.parametrize("store", ["as computed", "int8"])
def test_what_is_larger_than_the_limit_is_refused(store: str) -> None:
    tier = MemoryTier(3000, store)
    assert not tier.put(key(1), entry(100))
    assert not tier.put(key(1), entry(1))  # its tensors would fit, its objects don't
    assert tier.stats().refused == 2
    assert tier.stats().entries == tier.stats().bytes == 0


def test_the_later_of_two_wins() -> None:
    tier = MemoryTier(MIB)
    tier.put(key(1), entry(seed=1, labels=("a",)))
    tier.put(key(1), entry(30, seed=2, labels=("a", "b")))
    found = tier.get_many([key(1)])[key(1)]
    assert same(found.window, window(30, seed=2))
    assert found.labels == ("a", "b")
    assert len(tier) == 1


def test_expired_entries_are_misses_and_make_room() -> None:
    tier, now = MemoryTier(MIB), time.time()
    tier.put(key(1), entry(expires=now - 1))
    tier.put(key(2), entry(expires=now + 100))
    tier.put(key(3), entry(expires=now - 1))
    tier.put(key(4), entry())
    assert key(1) not in tier
    assert list(tier.get_many([key(1), key(2)])) == [key(2)]
    assert tier.prune(now) == 1
    assert tier.prune(now + 200) == 1
    assert list(tier.get_many([key(n) for n in range(5)])) == [key(4)]
    stats = tier.stats()
    assert (stats.expired, stats.entries) == (3, 1)
    tier.put(key(5), entry(expires=now - 1))
    assert tier.prune() == 1


def test_entries_are_found_by_label_and_removed() -> None:
    tier = MemoryTier(MIB)
    tier.put(key(1), entry(labels=("a", "b")))
    tier.put(key(2), entry(labels=("b",)))
    tier.put(key(3), entry(labels=("c",)))
    assert sorted(tier.keys_with(["b", "x"])) == [key(1), key(2)]
    assert tier.remove(tier.keys_with(["b"])) == 2
    assert tier.remove([key(1)]) == 0
    assert tier.stats().removed == 2
    assert len(tier) == 1
    tier.clear()
    assert (len(tier), tier.stats().bytes, tier.stats().removed) == (0, 0, 3)
    assert tier.put(key(1), entry())
    tier.close()
    assert tier.get_many([key(1)]) == {}
    assert not tier.put(key(1), entry())


def test_a_key_named_twice_counts_once() -> None:
    tier = MemoryTier(MIB)
    tier.put(key(1), entry())
    tier.get_many([key(1), key(1), key(2), key(2)])
    assert (tier.stats().hits, tier.stats().misses, tier.stats().hit_rate) == (1, 1, 0.5)


@pytest.mark.parametrize("bad", ["", "ab", "G" * 64, "AB" * 32, "a" * 63 + "\n", "../" + "a" * 61])
def test_other_keys_are_refused_before_anything_happens(bad: str) -> None:
    tier = MemoryTier(MIB)
    calls: list[Callable[[], object]] = [
        lambda: tier.get_many([key(1), bad]),
        lambda: tier.put(bad, entry()),
        lambda: tier.remove([bad]),
        lambda: bad in tier,
    ]
    for call in calls:
        with pytest.raises(CacheError):
            call()
    assert tier.stats() == MemoryTier(MIB).stats()


def test_nan_is_not_stored() -> None:
    tier, bad = MemoryTier(MIB), entry()
    bad.window.values[2][0, 0, 0] = float("nan")
    with pytest.raises(NonFiniteError, match="values of layer 2"):
        tier.put(key(1), bad)
    assert len(tier) == 0


def test_no_memory_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    tier, one = MemoryTier(MIB), entry()
    monkeypatch.setattr(torch, "empty", refuse)
    assert not tier.put(key(1), one)
    monkeypatch.undo()
    assert tier.stats().failed == 1
    assert tier.put(key(1), one)


def test_tensors_are_copied_and_decoded_outside_the_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    tier = MemoryTier(MIB, "int8")
    seen = []

    def copy(tensors: Sequence[torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        seen.append(tier._lock.locked())
        return in_one_block(tensors, *args, **kwargs)

    class Watched:
        name, exact = "int8", False

        def encode(self, given: Window) -> Any:
            seen.append(tier._lock.locked())
            return codec_named("int8").encode(given)

        def decode(self, *args: Any) -> Window:
            seen.append(tier._lock.locked())
            return codec_named("int8").decode(*args)

    monkeypatch.setattr(memory, "in_one_block", copy)
    monkeypatch.setattr(tier, "_codec", Watched())
    tier.put(key(1), entry())
    tier.get_many([key(1)])
    assert seen == [False, False, False]


def test_a_window_outlives_its_eviction() -> None:
    tier = MemoryTier(MIB)
    tier.put(key(1), entry(seed=4))
    held = tier.get_many([key(1)])[key(1)]
    tier.clear()
    tier.put(key(2), entry(seed=5))
    assert same(held.window, window(seed=4))


def test_only_host_memory_can_be_page_locked() -> None:
    with pytest.raises(InputError, match="page-locked"):
        MemoryTier(MIB, device="meta", pin=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_cuda_pinning_does_nothing() -> None:
    tier = MemoryTier(MIB, pin=True)
    assert tier.put(key(1), entry())
    assert same(tier.get_many([key(1)])[key(1)].window, window())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("store", ["as computed", "int8"])
def test_on_cuda(store: str) -> None:
    expected = settle(codec_named(store), window())
    host, near = MemoryTier(MIB, store, pin=True), MemoryTier(MIB, store, device="cuda")
    one = entry()
    moved = replace(
        one.window,
        keys=tuple(t.cuda() for t in one.window.keys),
        values=tuple(t.cuda() for t in one.window.values),
    )
    for tier in (host, near):
        assert tier.put(key(1), replace(one, window=moved))
        found = tier.get_many([key(1)])[key(1)].window
        tensors = (*found.keys, *found.values)
        assert {t.device.type for t in tensors} == {"cpu" if tier is host else "cuda"}
        for got, wanted in zip(tensors, (*expected.keys, *expected.values), strict=True):
            torch.testing.assert_close(got.cpu(), wanted, rtol=1e-6, atol=1e-6)
    if store == "as computed":
        assert host.get_many([key(1)])[key(1)].window.keys[0].is_pinned()
