"""What the cache has done and what it holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class TierStats:
    """One tier: what it holds now, and counters since it was opened.

    Attributes:
        entries: windows it holds.
        bytes: bytes they take, overheads that the tier counts included.
        limit_bytes: most bytes that it may hold.
        hits: windows asked for and returned.
        misses: windows asked for and not returned, for whatever reason.
        stored: windows taken in.
        evictions: windows dropped to make room.
        refused: windows not taken in: worth less than those they would displace, or too large.
        expired: windows dropped because their time was up.
        removed: windows dropped on request.
        quarantined: windows put aside because they could not be proved right.
        failed: windows not stored or not read because of an error of the device or file system.
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

    @property
    def hit_rate(self) -> float:
        """Hits over windows asked for, 0 to 1; 0 if none was asked for."""
        return share(self.hits, self.misses)


@dataclass(frozen=True, slots=True)
class CacheStats:
    """The whole cache.

    A window that one tier misses and the next one has is a hit here, so the sums over tiers differ
    from these.

    Attributes:
        hits: windows that needed no encoding by this caller.
        misses: windows that had to be encoded.
        joined: windows among the hits that another thread or process was encoding already.
        cached_tokens: tokens of the hits.
        seconds_saved: what encoding the hits took when they were stored.
        seconds_spent: what encoding the misses took.
        tiers: by name ("device", "memory", "disk"), fastest first.
    """

    hits: int = 0
    misses: int = 0
    joined: int = 0
    cached_tokens: int = 0
    seconds_saved: float = 0.0
    seconds_spent: float = 0.0
    tiers: Mapping[str, TierStats] = field(default_factory=dict)

    @property
    def hit_rate(self) -> float:
        """Hits over windows asked for, 0 to 1; 0 if none was asked for."""
        return share(self.hits, self.misses)

    @property
    def evictions(self) -> int:
        """Windows that tiers dropped to make room, all tiers together."""
        return sum(tier.evictions for tier in self.tiers.values())

    @property
    def refused(self) -> int:
        """Windows that tiers did not take in, all tiers together."""
        return sum(tier.refused for tier in self.tiers.values())

    @property
    def quarantined(self) -> int:
        """Windows that tiers put aside, all tiers together."""
        return sum(tier.quarantined for tier in self.tiers.values())

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers, for JSON and logs."""
        tiers = {name: asdict(tier) for name, tier in self.tiers.items()}
        return {**{name: getattr(self, name) for name in _NUMBERS}, "tiers": tiers}


_NUMBERS = ("hits", "misses", "joined", "cached_tokens", "seconds_saved", "seconds_spent")


def share(hits: int, misses: int) -> float:
    """Hits over all, 0 to 1; 0 if there were none."""
    return hits / (hits + misses) if hits + misses else 0.0
