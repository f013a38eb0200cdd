"""What the cache has done and what it holds, as numbers and as text that Prometheus scrapes.

The text is the exposition format 0.0.4
(https://prometheus.io/docs/instrumenting/exposition_formats/): a few lines per metric, which need
no client library. Serve it as ``text/plain; version=0.0.4``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from rag_windows.errors import InputError


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
        return _share(self.hits, self.misses)


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
        return _share(self.hits, self.misses)

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


def _share(hits: int, misses: int) -> float:
    """Hits over all, 0 to 1; 0 if there were none."""
    return hits / (hits + misses) if hits + misses else 0.0


CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""What an HTTP server sends along with the text."""

_CACHE = (
    ("hits", "counter", "hits_total", "Windows that needed no encoding."),
    ("misses", "counter", "misses_total", "Windows that had to be encoded."),
    ("joined", "counter", "joined_total", "Hits that another caller was encoding already."),
    ("cached_tokens", "counter", "cached_tokens_total", "Tokens of the hits."),
    ("seconds_saved", "counter", "saved_seconds_total", "What encoding the hits had taken."),
    ("seconds_spent", "counter", "spent_seconds_total", "What encoding the misses took."),
)
_TIER = (
    ("entries", "gauge", "tier_entries", "Windows held."),
    ("bytes", "gauge", "tier_bytes", "Bytes held."),
    ("limit_bytes", "gauge", "tier_limit_bytes", "Most bytes that may be held."),
    ("hits", "counter", "tier_hits_total", "Windows asked for and returned."),
    ("misses", "counter", "tier_misses_total", "Windows asked for and not returned."),
    ("stored", "counter", "tier_stored_total", "Windows taken in."),
    ("evictions", "counter", "tier_evictions_total", "Windows dropped to make room."),
    ("refused", "counter", "tier_refused_total", "Windows not taken in."),
    ("expired", "counter", "tier_expired_total", "Windows dropped because their time was up."),
    ("removed", "counter", "tier_removed_total", "Windows dropped on request."),
    ("quarantined", "counter", "tier_quarantined_total", "Windows put aside as not proved right."),
    ("failed", "counter", "tier_failed_total", "Errors of the device or the file system."),
)


def prometheus_text(
    stats: CacheStats,
    labels: Mapping[str, str] | None = None,
    namespace: str = "rag_windows_cache",
) -> str:
    """Write statistics down for a scraper.

    Args:
        stats: from `PassageCache.stats()`.
        labels: put on every sample, such as the model's name; values may hold any text. "tier" is
            ours.
        namespace: what every metric's name begins with.

    Raises:
        InputError: if a label's name is not one that the format allows.
    """
    constant = dict(labels or {})
    for name in constant:
        if name == "tier" or name.startswith("__") or not (name.isidentifier() and name.isascii()):
            message = f"{name!r} can't be a label's name; use ASCII letters, digits and underscores"
            raise InputError(message + " (and not 'tier').")
    tiers = [({**constant, "tier": name}, tier) for name, tier in stats.tiers.items()]
    lines: list[str] = []
    for table, owners in ((_CACHE, [(constant, stats)]), (_TIER, tiers)):
        for attribute, kind, metric, text in table if owners else ():
            name = f"{namespace}_{metric}"
            lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]
            lines += [_sample(name, own, getattr(owner, attribute)) for own, owner in owners]
    return "\n".join(lines) + "\n"


def _sample(metric: str, labels: Mapping[str, str], value: float) -> str:
    inside = ",".join(f'{name}="{_escape(text)}"' for name, text in labels.items())
    return f"{metric}{{{inside}}} {value!r}" if inside else f"{metric} {value!r}"


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
