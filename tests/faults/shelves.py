"""What 16 threads use at once: a tier, or the whole cache, behind the same few calls."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from functools import cache
from typing import Any

import torch

from rag_windows import PassageCache
from rag_windows.cache.codec import Entry
from rag_windows.cache.disk import DiskTier
from rag_windows.cache.memory import MemoryTier
from rag_windows.kv import Window

KEYS = tuple(f"{number:064x}" for number in range(1, 7))
VERSIONS = 16


def _make(number: int, version: int) -> Entry:
    """Its ids, numbers and size say which it is."""
    value = float(100 * number + version)
    shape = (1 + version % 3, 2, 2)
    tensors = tuple(torch.full(shape, value + layer) for layer in range(2))
    window = Window((number, version), 1, keys=tensors[:1], values=tensors[1:])
    return Entry(window, 0.01 * (1 + number), (KEYS[number],), 0.0)


ENTRIES = {(k, v): _make(k, v) for k in range(len(KEYS)) for v in range(VERSIONS)}


def version_of(number: int, entry: Entry) -> int:
    """Which version of a key an entry is; fails unless every part of it is that one's."""
    window = entry.window
    # What was on disk does not know its ids, so the numbers tell.
    version = int(window.keys[0][0, 0, 0]) - 100 * number
    expected = ENTRIES[number, version].window
    assert window.ids in (expected.ids, (0, 0))
    assert window.start == expected.start
    pairs = zip((*window.keys, *window.values), (*expected.keys, *expected.values), strict=True)
    assert all(torch.equal(got, wanted) for got, wanted in pairs)
    assert entry.labels == (KEYS[number],)
    return version


@cache
def _size(number: int, version: int, store: str) -> int:
    """Bytes that a memory tier counts for an entry."""
    tier = MemoryTier(1_000_000, store)
    tier.put(KEYS[number], ENTRIES[number, version])
    return tier.stats().bytes


class TierShelf:
    """A tier by itself.

    Attributes:
        roomy: everything fits, so nothing may be missing that was not removed.
        versions: how many different entries a key may stand for in turn.
        forgetful: what is being stored is undone by a removal at the same moment, or by another
            entry under the same key.
    """

    versions = VERSIONS
    forgetful = False

    def __init__(self, tier: MemoryTier | DiskTier, *, roomy: bool) -> None:
        self._tier: Any = tier
        self.roomy = roomy

    def put(self, number: int, version: int) -> bool:
        return bool(self._tier.put(KEYS[number], ENTRIES[number, version]))

    def get(self, numbers: Iterable[int]) -> dict[int, Entry]:
        found = self._tier.get_many([KEYS[number] for number in numbers])
        return {KEYS.index(key): entry for key, entry in found.items()}

    def remove(self, number: int) -> None:
        self._tier.remove([KEYS[number]])

    def clear(self) -> None:
        self._tier.clear()

    def settle(self) -> None:
        """Wait until nothing happens any more, and check what must then be true."""
        stats = self._tier.stats()
        assert 0 <= stats.bytes <= stats.limit_bytes
        assert stats.entries == sum(key in self._tier for key in KEYS)
        assert stats.quarantined == stats.failed == 0
        assert not (self.roomy and stats.evictions)

    def close(self) -> None:
        self._tier.close()


class MemoryShelf(TierShelf):
    """Host memory; the tight one holds about half of the entries."""

    def __init__(self, *, roomy: bool, store: str = "as computed") -> None:
        self._store = store
        super().__init__(MemoryTier(1_000_000 if roomy else 8_000, store), roomy=roomy)

    def settle(self) -> None:
        super().settle()
        held = self.get(range(len(KEYS)))
        sizes = [_size(n, version_of(n, entry), self._store) for n, entry in held.items()]
        assert self._tier.stats().bytes == sum(sizes)


class DiskShelf(TierShelf):
    """A folder of its own. What comes later takes away what others are still writing."""

    forgetful = True

    def __init__(self, *, roomy: bool) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="shelf-")
        super().__init__(DiskTier(self._folder.name, 10_000_000), roomy=roomy)

    def close(self) -> None:
        super().close()
        self._folder.cleanup()


class CacheShelf(TierShelf):
    """The whole cache: memory before a disk that holds everything.

    A key means one entry for ever, as it does where keys are hashes of all that matters.
    """

    versions = 1
    forgetful = True

    def __init__(self, *, roomy: bool) -> None:
        self.roomy = roomy
        self._folder = tempfile.TemporaryDirectory(prefix="shelf-")
        memory = 1_000_000 if roomy else 8_000
        self._tier = PassageCache(memory, disk=10_000_000, path=self._folder.name)

    def put(self, number: int, version: int) -> bool:
        entry = ENTRIES[number, version]
        self._tier.keep(KEYS[number], entry, self._tier.epoch, wait=True)
        return True

    def get(self, numbers: Iterable[int]) -> dict[int, Entry]:
        keys = [KEYS[number] for number in numbers]
        found = self._tier.quick(keys)
        found |= self._tier.from_disk([key for key in keys if key not in found])
        return {KEYS.index(key): entry for key, entry in found.items()}

    def remove(self, number: int) -> None:
        self._tier.invalidate(KEYS[number], every_tenant=True)

    def settle(self) -> None:
        assert self._tier.flush(60.0)
        for tier in self._tier.stats().tiers.values():
            assert 0 <= tier.bytes <= tier.limit_bytes
            assert tier.quarantined == tier.failed == 0

    def close(self) -> None:
        super().close()
        self._folder.cleanup()
