"""What the cache has done and what it holds, as numbers and as text that Prometheus scrapes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields
from typing import Any

from rag_windows.errors import InputError

_NAMESPACE = "rag_windows_cache"


def _total(text: str, metric: str | None = None) -> Any:
    """A number that only grows: what it counts, and its metric's name if that is another one."""
    return field(default=0, metadata={"kind": "counter", "text": text, "metric": metric})


def _held(text: str) -> Any:
    return field(default=0, metadata={"kind": "gauge", "text": text, "metric": None})


@dataclass(frozen=True, slots=True)
class TierStats:
    """One tier: what it holds now, and counters since it was opened."""

    entries: int = _held("Windows held.")
    bytes: int = _held("Bytes held.")
    limit_bytes: int = _held("Most bytes that may be held.")
    hits: int = _total("Windows asked for and returned.")
    misses: int = _total("Windows asked for and not returned.")
    stored: int = _total("Windows taken in.")
    evictions: int = _total("Windows dropped to make room.")
    refused: int = _total("Windows not taken in.")
    expired: int = _total("Windows dropped because their time was up.")
    removed: int = _total("Windows dropped on request.")
    quarantined: int = _total("Windows put aside as not proved right.")
    failed: int = _total("Errors of the device or the file system.")


@dataclass(frozen=True, slots=True)
class CacheStats:
    """The whole cache; `tiers` by name ("device", "memory", "disk"), fastest first.

    A window that one tier misses and the next one has is a hit here, so the sums over tiers differ
    from these.
    """

    hits: int = _total("Windows that needed no encoding.")
    misses: int = _total("Windows that had to be encoded.")
    joined: int = _total("Hits that another caller was encoding already.")
    cached_tokens: int = _total("Tokens of the hits.")
    seconds_saved: float = _total("What encoding the hits had taken.", "saved_seconds")
    seconds_spent: float = _total("What encoding the misses took.", "spent_seconds")
    tiers: Mapping[str, TierStats] = field(default_factory=dict)


def prometheus_text(stats: CacheStats, labels: Mapping[str, str] | None = None) -> str:
    """Write statistics in the exposition format 0.0.4; serve it as ``text/plain; version=0.0.4``.

    https://prometheus.io/docs/instrumenting/exposition_formats/

    Args:
        stats: from `PassageCache.stats()`.
        labels: put on every sample, such as the model's name; values may hold any text. "tier" is
            ours.

    Raises:
        InputError: if a label's name is not one that the format allows.
    """
    constant = dict(labels or {})
    for name in constant:
        if name == "tier" or name.startswith("__") or not (name.isidentifier() and name.isascii()):
            raise InputError(
                f"{name!r} can't be a label's name; use ASCII letters, digits and underscores "
                "(and not 'tier')."
            )
    tiers = [({**constant, "tier": name}, tier) for name, tier in stats.tiers.items()]
    lines: list[str] = []
    for one in fields(CacheStats):
        if one.name != "tiers":
            lines += _metric(_NAMESPACE, one, [(constant, stats)])
    for one in fields(TierStats) if tiers else ():
        lines += _metric(f"{_NAMESPACE}_tier", one, tiers)
    return "\n".join(lines) + "\n"


def _metric(prefix: str, one: Field[Any], owners: list[tuple[dict[str, str], Any]]) -> list[str]:
    """A number's lines: what it is, and a sample for each that has it."""
    kind = one.metadata["kind"]
    name = f"{prefix}_{one.metadata['metric'] or one.name}" + "_total" * (kind == "counter")
    lines = [f"# HELP {name} {one.metadata['text']}", f"# TYPE {name} {kind}"]
    for labels, owner in owners:
        inside = ",".join(f'{label}="{_escape(text)}"' for label, text in labels.items())
        shown = f"{{{inside}}}" if inside else ""
        lines.append(f"{name}{shown} {getattr(owner, one.name)!r}")
    return lines


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
