"""The cache's statistics as text that Prometheus and its relatives scrape.

The format is the text exposition format 0.0.4
(https://prometheus.io/docs/instrumenting/exposition_formats/): a few lines per metric, which need
no client library. Serve the text as ``text/plain; version=0.0.4``.
"""

from __future__ import annotations

from collections.abc import Mapping

from rag_windows.cache.stats import CacheStats, TierStats
from rag_windows.errors import InputError

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
    lines: list[str] = []
    for attribute, kind, metric, text in _CACHE:
        lines += _head(f"{namespace}_{metric}", kind, text)
        lines.append(_sample(f"{namespace}_{metric}", constant, getattr(stats, attribute)))
    for attribute, kind, metric, text in _TIER:
        if stats.tiers:
            lines += _head(f"{namespace}_{metric}", kind, text)
        lines += _tiers(f"{namespace}_{metric}", constant, stats.tiers, attribute)
    return "\n".join(lines) + "\n"


def _tiers(
    metric: str, constant: Mapping[str, str], tiers: Mapping[str, TierStats], attribute: str
) -> list[str]:
    return [
        _sample(metric, {**constant, "tier": name}, getattr(tier, attribute))
        for name, tier in tiers.items()
    ]


def _head(metric: str, kind: str, text: str) -> list[str]:
    return [f"# HELP {metric} {text}", f"# TYPE {metric} {kind}"]


def _sample(metric: str, labels: Mapping[str, str], value: float) -> str:
    inside = ",".join(f'{name}="{_escape(text)}"' for name, text in labels.items())
    return f"{metric}{{{inside}}} {value!r}" if inside else f"{metric} {value!r}"


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
