"""The tiers of one cache together: where an entry is looked for and where it goes."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from rag_windows.cache.device import to_host
from rag_windows.cache.entry import Entry
from rag_windows.cache.entry_key import is_key
from rag_windows.cache.flight import Flights
from rag_windows.cache.memory import MemoryTier
from rag_windows.cache.sizes import Size, free_disk, free_memory, parse_size
from rag_windows.cache.stats import CacheStats
from rag_windows.cache.tier import Tier
from rag_windows.cache.writer import Writer
from rag_windows.errors import NonFiniteError
from rag_windows.forks import Lock

if TYPE_CHECKING:
    from rag_windows.cache.disk import DiskTier

DEFAULT_DISK = "50GiB"
"""Taken where a path is given but no size."""

_WAITING_SHARE = 0.25
_LEAST_WAITING = 256 << 20
"""Bytes that may wait to be written: a share of the memory tier, and so many at least."""


class Counted(NamedTuple):
    """What one request did; see `CacheStats`."""

    hits: int = 0
    misses: int = 0
    joined: int = 0
    cached_tokens: int = 0
    seconds_saved: float = 0.0
    seconds_spent: float = 0.0


class Tiers:
    """The tiers and counters that the caches of several tenants share."""

    def __init__(
        self,
        memory: Size | None,
        disk: Size | None,
        path: Path | None,
        device: Size | None,
        store: str,
    ) -> None:
        self.flights: Flights[Entry] = Flights()
        self.epoch = 0
        self._store = store
        self._lock = Lock()
        self._counted = Counted()
        self._device_bytes = None if device is None else parse_size(device, "device")
        self._devices: dict[torch.device, MemoryTier] = {}
        self.memory: MemoryTier | None = None
        self.disk: DiskTier | None = None
        waiting = _LEAST_WAITING
        if memory is not None:
            limit = parse_size(memory, "memory", free_memory())
            self.memory = MemoryTier(limit, store, pin=torch.cuda.is_available())
            waiting = max(waiting, int(limit * _WAITING_SHARE))
        if path is not None:
            from rag_windows.cache.disk import DiskTier

            limit = parse_size(DEFAULT_DISK if disk is None else disk, "disk", free_disk(path))
            self.disk = DiskTier(path, limit, store)
        self.writer = Writer(waiting)

    def on(self, device: torch.device | None) -> list[MemoryTier]:
        """The tier on an accelerator, if one is wanted there."""
        if device is None or device.type == "cpu" or self._device_bytes is None:
            return []
        with self._lock:
            if device not in self._devices:
                self._devices[device] = MemoryTier(self._device_bytes, self._store, device=device)
            return [self._devices[device]]

    def all(self) -> Iterator[Any]:
        """Every tier, fastest first."""
        yield from self._devices.values()
        yield from (tier for tier in (self.memory, self.disk) if tier is not None)

    def get(self, tiers: Sequence[Tier | None], keys: Sequence[str]) -> dict[str, Entry]:
        """Look for keys in tiers, one after the other."""
        now = time.time()
        found: dict[str, Entry] = {}
        for tier in tiers:
            missing = [key for key in keys if key not in found]
            if tier is not None and missing:
                found |= tier.get_many(missing)
        return {key: entry for key, entry in found.items() if not entry.expired(now)}

    def keep(
        self,
        key: str,
        entry: Entry,
        epoch: int,
        device: torch.device | None,
        ready: Callable[[], None] | None,
        done: Callable[[], None] | None,
        *,
        wait: bool,
    ) -> None:
        """See `PassageCache.keep`."""
        near = self.on(device)
        on_host = all(tensor.device.type == "cpu" for tensor in entry.window.keys)
        if on_host and self.memory is not None:
            near.append(self.memory)
        self.put(near, key, entry, epoch)
        far: list[Tier] = [] if self.disk is None else [self.disk]
        if not on_host and self.memory is not None:
            far.insert(0, self.memory)

        def write(do: bool) -> None:
            try:
                if do and self.epoch == epoch:
                    if ready is not None:
                        ready()
                    self.put(far, key, replace(entry, window=to_host(entry.window)), epoch)
            finally:
                if done is not None:
                    done()

        if far:
            self.writer.submit(write, entry.nbytes, wait=wait)
        elif done is not None:
            done()

    def put(self, tiers: Sequence[Tier], key: str, entry: Entry, epoch: int) -> None:
        """Store an entry in some tiers, unless something was forgotten since the epoch."""
        if self.epoch != epoch:
            return
        for tier in tiers:
            with suppress(NonFiniteError):  # a lossy form that overflows is not kept
                tier.put(key, entry)
        if self.epoch != epoch:  # what was invalidated meanwhile must not come back
            for tier in tiers:
                tier.remove([key])

    def forget(self, named: Collection[str]) -> int:
        """Forget entries that are named by their keys or by a label; see `PassageCache`."""

        def drop(tier: Any) -> set[str]:
            keys = set(tier.keys_with(named))
            keys |= {one for one in named if is_key(one) and one in tier}
            tier.remove(keys)
            return keys

        return len(self._drop(drop))

    def remove(self, keys: Collection[str]) -> None:
        """See `PassageCache.remove`."""

        def drop(tier: Any) -> set[str]:
            tier.remove(list(keys))
            return set()

        self._drop(drop)

    def clear(self) -> None:
        """See `PassageCache.clear`."""

        def drop(tier: Any) -> set[str]:
            tier.clear()
            return set()

        self._drop(drop)

    def _drop(self, drop: Callable[[Any], set[str]]) -> set[str]:
        """Drop entries from every tier, for good; returns the keys that were dropped.

        Twice: a read that begins in the midst of the first round may find an entry that is still
        on disk, and put it into a fast tier that is through already. The second round's epoch
        stops such a read, and the round takes out what it has put there before.
        """
        dropped: set[str] = set()
        for _ in range(2):
            with self._lock:
                self.epoch += 1
            for tier in self.all():
                dropped |= drop(tier)
        return dropped

    def close(self) -> None:
        """See `PassageCache.close`."""
        self.writer.close()
        for tier in self.all():
            tier.close()

    def count(self, counted: Counted) -> None:
        """Add to the counters."""
        with self._lock:
            before = self._counted
            self._counted = Counted(
                hits=before.hits + counted.hits,
                misses=before.misses + counted.misses,
                joined=before.joined + counted.joined,
                cached_tokens=before.cached_tokens + counted.cached_tokens,
                seconds_saved=before.seconds_saved + counted.seconds_saved,
                seconds_spent=before.seconds_spent + counted.seconds_spent,
            )

    def stats(self) -> CacheStats:
        """Counters, and what each tier holds."""
        tiers = {}
        for device, tier in list(self._devices.items()):
            name = "device" if len(self._devices) == 1 else f"device {device}"
            tiers[name] = tier.stats()
        if self.memory is not None:
            tiers["memory"] = self.memory.stats()
        if self.disk is not None:
            tiers["disk"] = self.disk.stats()
        return CacheStats(**self._counted._asdict(), tiers=tiers)
