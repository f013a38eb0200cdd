"""Getting windows that no fast tier has: from disk, from whoever encodes them, or by encoding."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from rag_windows.cache.entry import Entry
from rag_windows.cache.passage_cache import PassageCache
from rag_windows.prefill import Source

FOLLOW_S = 120.0
"""How long to wait for another thread or process that encodes a window, before doing it too."""

_POLL_S = 0.005
_LONGEST_POLL_S = 0.1

Compute = Callable[[Sequence["Wanted"]], Iterator[Mapping[str, Entry | None]]]
"""Encodes windows and yields those of each pass by their keys; None for one that failed."""

Pauses = Generator[float, None, None]
"""See `rag_windows.prefill.Prefill`."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """A window that is missing."""

    key: str
    ids: tuple[int, ...]
    source: Source


class Misses:
    """One request's dealings with others that want the same windows.

    A window is encoded once, by one thread of one process of those that share the cache. Nobody
    waits while others wait for him: a request first encodes what it has claimed.

    Attributes:
        joined: windows that another thread or process encoded for this request.

    Args:
        cache: in which they are looked up.
        device: where they are wanted.
        waiting: called now and then while this request waits for others; what it raises ends it.
    """

    def __init__(
        self,
        cache: PassageCache,
        device: torch.device | None,
        waiting: Callable[[], None] = lambda: None,
    ) -> None:
        self.joined = 0
        self._waiting = waiting
        self._cache = cache
        self._device = device
        self._locks: dict[str, Any] = {}
        self._landed: list[str] = []

    def obtain(
        self,
        wanted: Mapping[str, Wanted],
        compute: Compute,
        told: Callable[[int], None] | None,
    ) -> Generator[float, None, dict[str, Entry]]:
        """Get every window, by whatever way; see `rag_windows.prefill.Prefill`.

        Args:
            wanted: by key.
            compute: encodes those that must be.
            told: called now and then with how many there are.

        Returns:
            The entries by key; those that `compute` failed to make are missing.
        """
        got: dict[str, Entry] = {}
        left = dict(wanted)
        hasty: dict[str, Wanted] = {}
        while left:
            mine, theirs = self._cache.flights.claim(left)
            yield from self._lead({key: left.pop(key) for key in mine}, compute, got, told)
            yield from self._wait(partial(_all_done, theirs.values()), _POLL_S)
            for key, flight in theirs.items():
                entry = flight.result() if flight.done() else None
                if entry is not None:
                    got[key] = entry
                    self.joined += 1
                    del left[key]
                elif not flight.done():
                    hasty[key] = left.pop(key)
            if told is not None and theirs:
                told(len(got))
        if hasty:
            for made in compute(list(hasty.values())):
                got |= {key: entry for key, entry in made.items() if entry is not None}
                yield 0.0
        return got

    def handed_over(self, key: str) -> Callable[[], None] | None:
        """Gives back a window's lock; to be called once it is on disk, or will not be."""
        lock = self._locks.pop(key, None)
        return None if lock is None else lock.release

    def release(self) -> None:
        """Give back what was not handed over; what this request keeps must be kept by now."""
        while self._landed:
            self._cache.flights.retire(self._landed.pop())
        while self._locks:
            self._locks.popitem()[1].release()

    def _lead(
        self,
        mine: Mapping[str, Wanted],
        compute: Compute,
        got: dict[str, Entry],
        told: Callable[[int], None] | None,
    ) -> Pauses:
        flying = dict(mine)

        def land(key: str, entry: Entry | None) -> None:
            if flying.pop(key, None) is not None:
                self._cache.flights.land(key, entry)
                if entry is not None:
                    self._landed.append(key)
                    got[key] = entry

        try:
            for key, entry in self._cache.slow(list(mine), self._device).items():
                land(key, entry)
            here, elsewhere = self._lock(list(flying))
            self._written_meanwhile(here, land)
            rest = [mine[key] for key in here if key in flying]
            yield from self._compute(rest, compute, land, told, got)
            if told is not None and not here:
                told(len(got))
            yield from self._await(elsewhere, land)
            left_over = [key for key in elsewhere if key in flying]
            self._lock(left_over)
            rest = [mine[key] for key in left_over]
            yield from self._compute(rest, compute, land, told, got)
        finally:
            for key in list(flying):
                land(key, None)

    def _compute(
        self,
        wanted: Sequence[Wanted],
        compute: Compute,
        land: Callable[[str, Entry | None], None],
        told: Callable[[int], None] | None,
        got: Mapping[str, Entry],
    ) -> Pauses:
        if not wanted:
            return
        for made in compute(wanted):
            for key, entry in made.items():
                land(key, entry)
                if told is not None and entry is not None:
                    told(len(got))
            yield 0.0

    def _lock(self, keys: Sequence[str]) -> tuple[list[str], list[str]]:
        """Keys that no other process encodes, locked now, and those that one does."""
        disk = self._cache.disk
        if disk is None or not keys:
            return list(keys), []
        here, elsewhere = [], []
        for key in keys:
            lock = disk.try_lock(key)
            if lock is None:
                elsewhere.append(key)
            else:
                self._locks[key] = lock
                here.append(key)
        return here, elsewhere

    def _written_meanwhile(
        self, locked: Sequence[str], land: Callable[[str, Entry | None], None]
    ) -> None:
        """Another process may have written a window after it was missed and before its lock."""
        disk = self._cache.disk
        if disk is None:
            return
        there = [key for key in locked if key in disk]
        if there:
            for key, entry in self._cache.from_disk(there, self._device).items():
                land(key, entry)
                self.joined += 1

    def _await(self, keys: Sequence[str], land: Callable[[str, Entry | None], None]) -> Pauses:
        """Wait until another process has written windows, has given up, or takes too long."""
        disk = self._cache.disk
        left = list(keys)
        if disk is None:
            return

        def all_free() -> bool:
            free = [key for key in left if not disk.locked(key)]
            found = self._cache.from_disk(free, self._device) if free else {}
            for key, entry in found.items():
                land(key, entry)
                self.joined += 1
            left[:] = [key for key in left if key not in free]
            return not left

        yield from self._wait(all_free, _LONGEST_POLL_S)

    def _wait(self, over: Callable[[], bool], longest: float) -> Pauses:
        """Pause until others are done, or take too long."""
        deadline = time.monotonic() + FOLLOW_S
        pause = _POLL_S
        while not over() and time.monotonic() < deadline:
            yield pause
            self._waiting()
            pause = min(longest, 2 * pause)


def _all_done(flights: Iterable[Future[Entry | None]]) -> bool:
    return all(flight.done() for flight in flights)
