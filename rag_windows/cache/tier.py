"""What all tiers have in common: keys, counters, and a policy for what is worth its room."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import Literal

from rag_windows.cache.codec import Entry, check_store
from rag_windows.cache.counters import TierStats
from rag_windows.cache.keys import check_key
from rag_windows.cache.policy import Policy
from rag_windows.threads import in_children

Outcome = Literal["stored", "refused", "failed"]
"""What came of storing an entry."""


class Tier(ABC):
    """Keeps entries under a limit in bytes; threads may share one.

    What goes wrong is a miss, or an entry that is not kept, never an error. A tier of another kind
    says how to look, put, drop, and what it holds; `_lock` guards policy and counters.
    """

    def __init__(self, limit_bytes: int, store: str) -> None:
        self._limit_bytes = limit_bytes
        self._store = check_store(store)
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._policy = Policy(limit_bytes)
        in_children(self)

    def after_fork(self) -> None:
        """A child looks anew what is there; what is counted is the parent's."""
        self._lock = threading.Lock()
        self._policy = Policy(self._limit_bytes)

    def get_many(self, keys: Sequence[str]) -> dict[str, Entry]:
        """Return the entries that are there and proved right; every key counts once."""
        asked = list(dict.fromkeys(map(check_key, keys)))
        found = self._look(asked)
        with self._lock:
            for key in asked:
                self._policy.touch(key)
        self._count(hits=len(found), misses=len(asked) - len(found))
        return found

    def put(self, key: str, entry: Entry) -> bool:
        """Keep an entry in place of the key's present one; False if it isn't there afterwards."""
        outcome = self._put(check_key(key), entry)
        self._count(**{outcome: 1})
        return outcome == "stored"

    def remove(self, keys: Iterable[str]) -> int:
        """Drop entries; returns how many there were."""
        dropped = self._drop(list(dict.fromkeys(map(check_key, keys))))
        self._count(removed=dropped)
        return dropped

    def prune(self, now: float) -> int:
        """Drop what has expired at unix time `now`; returns how much."""
        dropped = self._drop(self._late(now))
        self._count(expired=dropped)
        return dropped

    def stats(self) -> TierStats:
        """Counters since the tier was made, and what it holds now."""
        entries, size = self._holds()
        with self._lock:
            return TierStats(entries, size, self._limit_bytes, **self._counts)

    @abstractmethod
    def __contains__(self, key: str) -> bool:
        """Whether an entry is there, by what is known without reading it."""

    @abstractmethod
    def add_labels(self, key: str, labels: Collection[str]) -> None:
        """Give an entry these labels beside its own."""

    @abstractmethod
    def keys_with(self, labels: Collection[str]) -> list[str]:
        """Keys of the entries that carry any of the labels."""

    @abstractmethod
    def clear(self) -> None:
        """Drop all entries. Counters stay, counted uses don't."""

    @abstractmethod
    def close(self) -> None:
        """Let everything go: all that is asked for is missing from now on."""

    @abstractmethod
    def _look(self, keys: Sequence[str]) -> dict[str, Entry]: ...

    @abstractmethod
    def _put(self, key: str, entry: Entry) -> Outcome: ...

    @abstractmethod
    def _drop(self, keys: Sequence[str]) -> int: ...

    @abstractmethod
    def _late(self, now: float) -> list[str]: ...

    @abstractmethod
    def _holds(self) -> tuple[int, int]: ...

    def _forget(self, keys: Iterable[str]) -> None:
        """Entries are gone for another reason than for want of room."""
        with self._lock:
            for key in keys:
                self._policy.forget(key)

    def _count(self, **counts: int) -> None:
        with self._lock:
            self._counts.update(counts)
