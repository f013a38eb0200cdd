"""What all tiers share, and the statistics of tiers and cache, as numbers and for Prometheus."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Literal

from rag_windows.cache.codec import Entry, check_store
from rag_windows.cache.keys import check_key
from rag_windows.cache.policy import Policy
from rag_windows.errors import InputError
from rag_windows.threads import in_children

Outcome = Literal["stored", "refused", "failed"]
"""What came of storing an entry."""


@dataclass(frozen=True, slots=True)
class TierStats:
    """One tier: what it holds now, and counters since it was opened.

    `expired`, `removed` and `quarantined` (damaged) windows were dropped; `refused` ones were not
    worth their space; `failed` counts errors of the device or the file system, `late` what did not
    come before encoding was quicker. A shared store has no limit and is not listed: `entries`,
    `bytes` and `limit_bytes` are 0 there, and metrics leave them out.
    """

    entries: int = 0
    bytes: int = 0
    limit_bytes: int = 0
    hits: int = 0
    misses: int = 0
    stored: int = 0
    evictions: int = 0
    refused: int = 0
    expired: int = 0
    removed: int = 0
    quarantined: int = 0
    failed: int = 0
    late: int = 0


@dataclass(frozen=True, slots=True)
class CacheStats:
    """The whole cache; `tiers` by name ("device", "memory", "disk", "shared"), fastest first.

    A window that one tier misses and the next one has is a hit here, so the sums over tiers differ
    from these. `joined` counts hits that another caller was encoding already.
    """

    hits: int = 0
    misses: int = 0
    joined: int = 0
    cached_tokens: int = 0
    seconds_saved: float = 0
    seconds_spent: float = 0
    tiers: Mapping[str, TierStats] = field(default_factory=dict)


_GAUGES = {"entries", "bytes", "limit_bytes"}
_METRICS = {"seconds_saved": "saved_seconds", "seconds_spent": "spent_seconds"}


def prometheus_text(stats: CacheStats, labels: Mapping[str, str]) -> str:
    """Write statistics in the exposition format 0.0.4, with these labels on every sample.

    https://prometheus.io/docs/instrumenting/exposition_formats/

    Raises:
        InputError: if a label's name is not one that the format allows.
    """
    for name in labels:
        if name == "tier" or name.startswith("__") or not (name.isidentifier() and name.isascii()):
            raise InputError(
                f"{name!r} can't be the name of a metrics label. Use ASCII letters, digits and "
                "underscores, and not 'tier'."
            )
    samples: dict[str, list[str]] = {}
    owners: list[tuple[str, Mapping[str, str], CacheStats | TierStats]] = [("", labels, stats)]
    owners += [("_tier", {**labels, "tier": name}, tier) for name, tier in stats.tiers.items()]
    for part, given, owner in owners:
        inside = ",".join(f'{name}="{_escape(text)}"' for name, text in given.items())
        shown = f"{{{inside}}}" if inside else ""
        listed = isinstance(owner, CacheStats) or owner.limit_bytes > 0
        for one in fields(owner):
            if one.name != "tiers" and (listed or one.name not in _GAUGES):
                total = "" if one.name in _GAUGES else "_total"
                metric = f"rag_windows_cache{part}_{_METRICS.get(one.name, one.name)}{total}"
                line = f"{metric}{shown} {getattr(owner, one.name)!r}"
                samples.setdefault(metric, []).append(line)
    lines: list[str] = []
    for metric, own in samples.items():
        kind = "counter" if metric.endswith("_total") else "gauge"
        lines += [f"# TYPE {metric} {kind}", *own]
    return "\n".join(lines) + "\n"


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


class Tier(ABC):
    """Stores entries under a limit in bytes; threads may share one.

    A failure is a miss, or an entry that is not stored, never an error.
    """

    def __init__(self, limit_bytes: int, store: str) -> None:
        self._limit_bytes = limit_bytes
        self._store = check_store(store)
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._policy = Policy(limit_bytes)
        in_children(self)

    def after_fork(self) -> None:
        """A child looks again at what is stored."""
        self._lock = threading.Lock()
        self._policy = Policy(self._limit_bytes)

    def get_many(self, keys: Sequence[str]) -> dict[str, Entry]:
        """Return the entries that are there and verified; every key counts once."""
        asked = list(dict.fromkeys(map(check_key, keys)))
        found = self._look(asked)
        with self._lock:
            for key in asked:
                self._policy.touch(key)
        self._count(hits=len(found), misses=len(asked) - len(found))
        return found

    def put(self, key: str, entry: Entry) -> bool:
        """Store an entry in place of the key's present one; False if it isn't there afterwards."""
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
    def _look(self, keys: Sequence[str]) -> dict[str, Entry]: ...

    @abstractmethod
    def _put(self, key: str, entry: Entry) -> Outcome: ...

    @abstractmethod
    def _drop(self, keys: Sequence[str]) -> int: ...

    @abstractmethod
    def _late(self, now: float) -> list[str]: ...

    @abstractmethod
    def _holds(self) -> tuple[int, int]: ...

    def _count(self, **counts: int) -> None:
        with self._lock:
            self._counts.update(counts)
