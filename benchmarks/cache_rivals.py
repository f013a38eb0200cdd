"""Known policies under a limit in bytes, for `cache_policy.py` to compare ours with.

Each has the part of `rag_windows.cache.policy.Policy` that a replay needs. They are written for
comparison, not for use; where a paper counts entries, they count bytes.
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from typing import Protocol


class Replayed(Protocol):
    """What a replay calls."""

    def touch(self, key: str) -> None:
        """A request, for a key held or not."""

    def admit(self, key: str, nbytes: int, cost_s: float) -> list[str] | None:
        """A key that isn't held is offered; returns what was given up, None if refused."""

    def __contains__(self, key: object) -> bool:
        """Whether it is held."""


class LRU:
    """The least recently used goes."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit, self._nbytes = limit_bytes, 0
        self._sizes: OrderedDict[str, int] = OrderedDict()

    def __contains__(self, key: object) -> bool:
        return key in self._sizes

    def touch(self, key: str) -> None:
        """See `Replayed`."""
        if key in self._sizes:
            self._sizes.move_to_end(key)

    def admit(self, key: str, nbytes: int, cost_s: float) -> list[str] | None:
        """See `Replayed`."""
        if nbytes > self._limit:
            return None
        self._sizes[key] = nbytes
        self._nbytes += nbytes
        victims = []
        while self._nbytes > self._limit:
            victim, size = self._sizes.popitem(last=False)
            self._nbytes -= size
            victims.append(victim)
        return victims


class GreedyDual:
    """Greedy-Dual-Size-Frequency (Cherkasova 1998): inflation + uses x cost / bytes, lowest goes.

    With `plain`, LFU: uses alone, among equals the least recently used goes.
    """

    def __init__(self, limit_bytes: int, *, plain: bool = False) -> None:
        self._limit, self._nbytes, self._plain = limit_bytes, 0, plain
        self._inflation, self._now = 0.0, 0
        self._held: dict[str, tuple[int, float, int, tuple[float, int]]] = {}
        self._heap: list[tuple[tuple[float, int], str]] = []

    def __contains__(self, key: object) -> bool:
        return key in self._held

    def touch(self, key: str) -> None:
        """See `Replayed`."""
        if key in self._held:
            nbytes, worth, uses, _ = self._held[key]
            self._rank(key, nbytes, worth, uses + 1)

    def admit(self, key: str, nbytes: int, cost_s: float) -> list[str] | None:
        """See `Replayed`."""
        if nbytes > self._limit:
            return None
        self._nbytes += nbytes
        self._rank(key, nbytes, 1.0 if self._plain else cost_s / nbytes, 1)
        victims = []
        while self._nbytes > self._limit:
            rank, victim = heapq.heappop(self._heap)
            if victim in self._held and self._held[victim][3] == rank:
                self._inflation = 0.0 if self._plain else rank[0]
                self._nbytes -= self._held.pop(victim)[0]
                victims.append(victim)
        return victims

    def _rank(self, key: str, nbytes: int, worth: float, uses: int) -> None:
        self._now += 1
        rank = (self._inflation + uses * worth, self._now)
        self._held[key] = (nbytes, worth, uses, rank)
        heapq.heappush(self._heap, (rank, key))


class WTinyLFU:
    """W-TinyLFU (https://arxiv.org/abs/1512.00727) with 1% of the bytes as the window.

    The rest is a segmented LRU (80% protected). What leaves the window enters if its uses times
    cost exceed those of all it displaces (https://arxiv.org/abs/2105.08770). Uses are counted
    exactly, not in a sketch, and halved after 10 requests per window held.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._parts: dict[str, OrderedDict[str, int]] = {
            name: OrderedDict() for name in ("window", "probation", "protected")
        }
        self._nbytes = dict.fromkeys(self._parts, 0)
        self._costs: dict[str, float] = {}
        self._uses: Counter[str] = Counter()
        self._requests = 0

    def __contains__(self, key: object) -> bool:
        return any(key in part for part in self._parts.values())

    def touch(self, key: str) -> None:
        """See `Replayed`."""
        self._uses[key] += 1
        self._requests += 1
        if self._requests >= 10 * max(100, sum(map(len, self._parts.values()))):
            self._requests = 0
            self._uses = Counter({k: uses // 2 for k, uses in self._uses.items() if uses > 1})
        for name in ("window", "protected"):
            if key in self._parts[name]:
                self._parts[name].move_to_end(key)
        if key in self._parts["probation"]:
            self._move(key, "probation", "protected")
            while self._nbytes["protected"] > 0.8 * 0.99 * self._limit:
                self._move(next(iter(self._parts["protected"])), "protected", "probation")

    def admit(self, key: str, nbytes: int, cost_s: float) -> list[str] | None:
        """See `Replayed`."""
        if nbytes > 0.99 * self._limit:
            return None
        self._costs[key] = cost_s
        self._parts["window"][key] = nbytes
        self._nbytes["window"] += nbytes
        victims: list[str] = []
        # One window may fill it alone: 1% of a small cache is less than that.
        while self._nbytes["window"] > 0.01 * self._limit and len(self._parts["window"]) > 1:
            victims += self._settle(next(iter(self._parts["window"])))
        while sum(self._nbytes.values()) > self._limit:
            name = "probation" if self._parts["probation"] else "protected"
            victims.append(self._drop(name, next(iter(self._parts[name]))))
        return victims

    def _settle(self, key: str) -> list[str]:
        size = self._parts["window"][key]
        free = 0.99 * self._limit - self._nbytes["probation"] - self._nbytes["protected"]
        displaced: list[tuple[str, str]] = []
        lost = 0.0
        for name in ("probation", "protected"):
            for other, other_size in self._parts[name].items():
                if free >= size:
                    break
                displaced.append((name, other))
                free += other_size
                lost += self._uses[other] * self._costs[other]
        if free < size or (displaced and self._uses[key] * self._costs[key] <= lost):
            return [self._drop("window", key)]
        victims = [self._drop(name, other) for name, other in displaced]
        self._move(key, "window", "probation")
        return victims

    def _move(self, key: str, source: str, target: str) -> None:
        size = self._parts[source].pop(key)
        self._nbytes[source] -= size
        self._parts[target][key] = size
        self._nbytes[target] += size

    def _drop(self, name: str, key: str) -> str:
        self._nbytes[name] -= self._parts[name].pop(key)
        return key


class S3FIFO:
    """S3-FIFO (Yang et al., SOSP 2023): a small queue of 10%, a main one, and a list of ghosts."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._small: OrderedDict[str, int] = OrderedDict()
        self._main: OrderedDict[str, int] = OrderedDict()
        self._ghosts: OrderedDict[str, None] = OrderedDict()
        self._small_bytes = self._main_bytes = 0
        self._uses: dict[str, int] = {}

    def __contains__(self, key: object) -> bool:
        return key in self._uses

    def touch(self, key: str) -> None:
        """See `Replayed`."""
        if key in self._uses:
            self._uses[key] = min(3, self._uses[key] + 1)

    def admit(self, key: str, nbytes: int, cost_s: float) -> list[str] | None:
        """See `Replayed`."""
        if nbytes > self._limit:
            return None
        victims: list[str] = []
        while self._small_bytes + self._main_bytes + nbytes > self._limit:
            from_small = self._small_bytes > 0.1 * self._limit or not self._main
            victims += self._shrink_small() if from_small else self._shrink_main()
        self._uses[key] = 0
        if key in self._ghosts:
            del self._ghosts[key]
            self._main[key] = nbytes
            self._main_bytes += nbytes
        else:
            self._small[key] = nbytes
            self._small_bytes += nbytes
        return victims

    def _shrink_small(self) -> list[str]:
        key, size = self._small.popitem(last=False)
        self._small_bytes -= size
        if self._uses[key] > 1:
            self._uses[key] = 0
            self._main[key] = size
            self._main_bytes += size
            return []
        del self._uses[key]
        self._ghosts[key] = None
        while len(self._ghosts) > len(self._main):
            self._ghosts.popitem(last=False)
        return [key]

    def _shrink_main(self) -> list[str]:
        key, size = self._main.popitem(last=False)
        if self._uses[key]:
            self._uses[key] -= 1
            self._main[key] = size
            return []
        self._main_bytes -= size
        del self._uses[key]
        return [key]
