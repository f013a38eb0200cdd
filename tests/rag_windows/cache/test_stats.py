"""What the cache says about itself."""

from __future__ import annotations

import json
import re

import pytest

from rag_windows import InputError
from rag_windows.cache.counters import CacheStats, TierStats, prometheus_text

STATS = CacheStats(
    hits=30,
    misses=10,
    joined=2,
    cached_tokens=4096,
    seconds_saved=1.5,
    seconds_spent=0.25,
    tiers={
        "memory": TierStats(entries=3, bytes=300, limit_bytes=1000, hits=20, misses=20, refused=4),
        "disk": TierStats(entries=9, bytes=900, evictions=5, refused=1, quarantined=2),
    },
)
# One sample of the text exposition format 0.0.4: name, labels, value.
SAMPLE = re.compile(
    r'([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{((?:[a-zA-Z_]\w*="(?:[^"\\\n]|\\[\\"n])*",?)*)\})? (\S+)'
)


def test_rates_and_sums() -> None:
    assert STATS.hit_rate == 0.75
    assert CacheStats().hit_rate == TierStats().hit_rate == 0.0
    assert STATS.tiers["memory"].hit_rate == 0.5


def test_as_dict_is_json() -> None:
    plain = json.loads(json.dumps(STATS.as_dict()))
    assert plain["hits"] == 30
    assert plain["seconds_saved"] == 1.5
    assert plain["tiers"]["disk"]["quarantined"] == 2


def test_every_number_is_a_sample_of_its_own() -> None:
    text = prometheus_text(STATS)
    assert text.endswith("\n")
    samples: dict[tuple[str, str], float] = {}
    announced: dict[str, str] = {}
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            assert name not in announced
            announced[name] = kind
        elif not line.startswith("# HELP "):
            match = SAMPLE.fullmatch(line)
            assert match is not None, line
            name, labels, value = match.groups()
            assert name in announced
            assert (announced[name] == "counter") == name.endswith("_total")
            assert (name, labels or "") not in samples
            samples[name, labels or ""] = float(value)
    assert samples["rag_windows_cache_hits_total", ""] == 30
    assert samples["rag_windows_cache_saved_seconds_total", ""] == 1.5
    assert samples["rag_windows_cache_tier_bytes", 'tier="disk"'] == 900
    assert len(samples) == 6 + 2 * len(TierStats.__slots__)


def test_a_label_holds_any_text() -> None:
    text = prometheus_text(STATS, {"model": 'a "b"\\c\nd'}, namespace="x")
    assert 'x_hits_total{model="a \\"b\\"\\\\c\\nd"} 30\n' in text
    assert 'x_tier_hits_total{model="a \\"b\\"\\\\c\\nd",tier="memory"} 20\n' in text
    assert all(SAMPLE.fullmatch(line) for line in text.splitlines() if not line.startswith("#"))


@pytest.mark.parametrize("name", ["tier", "__name__", "a-b", "", "1a", "ä"])
def test_a_label_that_the_format_does_not_allow_is_refused(name: str) -> None:
    with pytest.raises(InputError, match="label"):
        prometheus_text(STATS, {name: "x"})


def test_without_tiers_there_are_no_samples_of_tiers() -> None:
    assert "tier" not in prometheus_text(CacheStats())
